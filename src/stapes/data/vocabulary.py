"""The tokens that a model is to write: characters, or parts of words learnt from the transcripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

from stapes.data.manifest import Manifest, Utterance, read_cuts
from stapes.errors import UsageError
from stapes.text.ctc_tokenizer import CTCTokenizer

VocabularyKind = Literal["char", "bpe", "unigram"]

_MARKERS = ("<pad>", "<s>", "</s>", "<unk>")
_DELIMITER = "|"


def build_vocabulary(
    cuts: str | Path | Manifest | Iterable[Utterance] | Iterable[str],
    kind: VocabularyKind = "char",
    size: int | None = None,
    *,
    min_count: int = 1,
) -> CTCTokenizer:
    """A tokenizer for the texts of ``cuts`` (a manifest, its path, utterances, or the texts themselves).

    kind: ``char`` takes every character. ``bpe`` (Sennrich et al. 2016) and ``unigram`` (Kudo 2018) also take parts of
        words, learnt by the library ``tokenizers``; they never cross words, and text is cut into the longest that fit,
        so that any reader of ``vocab.json`` cuts it alike.
    size: tokens in all, markers included; for ``bpe`` and ``unigram``. 500 where not given.
    min_count: characters seen less often are unknown.

    Id 0 is ``<pad>``, CTC's blank; then come ``<s>``, ``</s>``, ``<unk>`` and, where words are separated, ``|``: as in
    wav2vec 2.0's vocabularies. Raises UsageError for texts without a character, and a size that is too small.
    """
    if kind not in get_args(VocabularyKind):
        raise UsageError(f"The kind of vocabulary is {kind!r}: say {', '.join(get_args(VocabularyKind))}")
    words: Counter[str] = Counter()
    spaced = False
    for text in _texts(cuts):
        found = text.split()
        words.update(found)
        spaced = spaced or len(found) > 1
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    alphabet = sorted(character for character, count in characters.items() if count >= min_count)
    if not alphabet:
        raise UsageError("There are no texts to make a vocabulary of: prepare the corpus again")
    if spaced and _DELIMITER in alphabet:
        raise UsageError(f"The texts contain {_DELIMITER!r}, which marks spaces: prepare them with --normalize basic")
    heads = [*_MARKERS, *([_DELIMITER] if spaced else [])]
    pieces = alphabet
    if kind != "char":
        wanted = (500 if size is None else size) - len(heads)
        if wanted < len(alphabet):
            raise UsageError(
                f"A vocabulary of {size} has no room for {len(heads)} markers and {len(alphabet)} characters: make it "
                "larger, or leave out rare characters with min_count"
            )
        pieces = [*alphabet, *_learn(kind, words, alphabet, wanted)]
    return CTCTokenizer({token: id for id, token in enumerate([*heads, *pieces])}, delimiter=_DELIMITER)


def _texts(cuts: str | Path | Manifest | Iterable[Utterance] | Iterable[str]) -> Iterator[str]:
    if isinstance(cuts, str | Path):
        cuts = read_cuts(Path(cuts))
    for each in cuts:
        yield each if isinstance(each, str) else each.text


def _learn(kind: VocabularyKind, words: Counter[str], alphabet: list[str], size: int) -> list[str]:
    """Parts of words beyond single characters, so many that there are ``size`` with the ``alphabet``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    known = set(alphabet)
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    # A sorted order: the same texts in another order give the same parts.
    lines = (word for word in sorted(words) if known.issuperset(word) for _ in range(words[word]))
    tokenizer.train_from_iterator(lines, trainer)
    learnt = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    found = [token for token, _ in learnt if len(token) > 1 and token not in _MARKERS and known.issuperset(token)]
    return found[: size - len(alphabet)]
