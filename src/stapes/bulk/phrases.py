"""What models write though nobody says it, and in which letters languages are written."""

from __future__ import annotations

from stapes.errors import UsageError
from stapes.text.tokenizers import language_code

PHRASES = (
    "thank you for watching",
    "thanks for watching",
    "thank you so much for watching",
    "please subscribe to my channel",
    "please like and subscribe",
    "subtitles by the amara.org community",
    "transcription by castingwords",
    "untertitel der amara.org-community",
    "untertitel im auftrag des zdf",
    "untertitelung des zdf",
    "untertitel von stephanie geiges",
    "copyright wdr",
    "sous-titres réalisés par la communauté d'amara.org",
    "sous-titrage société radio-canada",
    "sous-titrage st' 501",
    "merci d'avoir regardé cette vidéo",
    "sottotitoli creati dalla comunità amara.org",
    "sottotitoli e revisione a cura di qtss",
    "subtítulos realizados por la comunidad de amara.org",
    "subtítulos por la comunidad de amara.org",
    "gracias por ver el video",
    "legendas pela comunidade amara.org",
    "obrigado por assistir",
    "ondertitels ingediend door de amara.org gemeenschap",
    "napisy stworzone przez społeczność amara.org",
    "dziękuję za uwagę",
    "altyazı m.k.",
    "izlediğiniz için teşekkür ederim",
    "субтитры сделал dimatorzok",
    "субтитры создавал dimatorzok",
    "продолжение следует",
    "редактор субтитров",
    "ご視聴ありがとうございました",
    "字幕志愿者",
    "请不吝点赞 订阅 转发 打赏支持明镜与点点栏目",
    "시청해주셔서 감사합니다",
    "ترجمة نانسي قنقر",
)
"""Of subtitles that models have learnt from, and write over silence and music."""

_HAN = frozenset({"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "FULLWIDTH", "HALFWIDTH", "IDEOGRAPHIC"})
_SCRIPTS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("ru", "uk", "be", "bg", "mk", "mn", "tg", "ba", "tt"), frozenset({"CYRILLIC"})),
    **dict.fromkeys(("kk", "sr", "az", "uz", "tk", "bs"), frozenset({"CYRILLIC", "LATIN"})),
    **dict.fromkeys(("ar", "fa", "ur", "ps", "sd"), frozenset({"ARABIC"})),
    **dict.fromkeys(("he", "yi"), frozenset({"HEBREW"})),
    **dict.fromkeys(("hi", "mr", "ne", "sa"), frozenset({"DEVANAGARI"})),
    **dict.fromkeys(("bn", "as"), frozenset({"BENGALI"})),
    **dict.fromkeys(("zh", "yue", "ja"), _HAN),
    "ko": frozenset({"HANGUL", "CJK"}),
    "el": frozenset({"GREEK"}),
    "hy": frozenset({"ARMENIAN"}),
    "ka": frozenset({"GEORGIAN"}),
    "th": frozenset({"THAI"}),
    "lo": frozenset({"LAO"}),
    "km": frozenset({"KHMER"}),
    "my": frozenset({"MYANMAR"}),
    "ta": frozenset({"TAMIL"}),
    "te": frozenset({"TELUGU"}),
    "kn": frozenset({"KANNADA"}),
    "ml": frozenset({"MALAYALAM"}),
    "gu": frozenset({"GUJARATI"}),
    "pa": frozenset({"GURMUKHI", "ARABIC"}),
    "si": frozenset({"SINHALA"}),
    "am": frozenset({"ETHIOPIC"}),
    "bo": frozenset({"TIBETAN"}),
}
_LATIN = frozenset({"LATIN"})


def expected_scripts(language: str | None) -> frozenset[str] | None:
    """The scripts that a language of Whisper is written in, by their Unicode names; None for others."""
    if language is None:
        return None
    try:
        code = language_code(language)
    except UsageError:
        return None
    return _SCRIPTS.get(code, _LATIN)
