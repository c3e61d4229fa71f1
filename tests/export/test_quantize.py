"""Models in 8 bits: smaller, nearly the same numbers, no row that depends on others, refused where words suffer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import soundfile
import torch
from borrowed_tokenizer import a_tokenizer
from onnx import TensorProto, helper, numpy_helper
from small_whisper import random_weights, write_huggingface

from ctc_models import babble
from stapes.checkpoints import catalog
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.load import load_whisper, open_checkpoint
from stapes.checkpoints.onnx_folder import WEIGHTS, read_onnx_folder
from stapes.devices.backend import resolve
from stapes.errors import ModelError, UsageError
from stapes.export.calibration import Calibration
from stapes.export.int8 import FULL, REDUCED, Rewriter, matrices, quantize_weight, rows_in_int8, spread
from stapes.export.quantize import QuantizeReport, QuantizeSettings, quantize
from stapes.export.weight_only import HARMLESS, Passage, as_on_a_gpu, measure_roles, role
from stapes.export.weights import WeightsFile
from stapes.inference.gpu_encoder import GpuEncoder
from stapes.inference.onnx_session import CPU, Session
from stapes.inference.quantized import Fp8Linear, QuantizedLinear, quantizer
from stapes.kernels.fp8_weights import Fp8Weight, dequantize_fp8
from stapes.kernels.quantization import Quantized, dequantize
from stapes.loading import load
from stapes.models.whisper import WhisperConfig

SECOND = 16_000
GENERATOR = np.random.default_rng(0)


def two_layers(folder: Path, activation: str = "Tanh") -> dict[str, str]:
    """A graph y = activation(x A) B, and columns of B by their numbers."""
    a = GENERATOR.normal(size=(96, 128)).astype(np.float32)
    b = GENERATOR.normal(size=(128, 64)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["h"]),
        helper.make_node(activation, ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "B"], ["y"]),
        helper.make_node("Gather", ["B", "ids"], ["columns"], axis=1),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 96]),
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
    ]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 64]),
        helper.make_tensor_value_info("columns", TensorProto.FLOAT, [128, "n"]),
    ]
    weights = [numpy_helper.from_array(a, "A"), numpy_helper.from_array(b, "B")]
    made = helper.make_graph(nodes, "g", inputs, outputs, weights)
    with WeightsFile(folder) as file:
        file.write(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), "ctc.onnx")
    return {"ctc": "ctc.onnx"}


def rewritten(folder: Path, target: Path, *, static: bool, largest: int = REDUCED) -> Session:
    """The graph of a folder in 8 bits."""
    target.mkdir()
    model = onnx.load(str(folder / "ctc.onnx"), load_external_data=False)
    rewriter = Rewriter(model, folder, set(), largest)
    if static:
        rewriter.static({"x": (-4.0, 4.0), "t": (-1.0, 1.0)})
    else:
        rewriter.dynamic()
    with WeightsFile(target) as file:
        file.write(model, "ctc.onnx", folder)
    return Session(target / "ctc.onnx", resolve("cpu"), CPU)


@pytest.mark.parametrize("static", [False, True])
def test_numbers_stay_near_and_weights_are_a_quarter(tmp_path: Path, static: bool) -> None:
    two_layers(tmp_path)
    before = Session(tmp_path / "ctc.onnx", resolve("cpu"), CPU)
    after = rewritten(tmp_path, tmp_path / "int8", static=static)
    inputs = {"x": torch.from_numpy(GENERATOR.normal(size=(40, 96)).astype(np.float32)), "ids": torch.tensor([3, 0])}
    wanted, got = before(inputs), after(inputs)
    for name in wanted:
        error = (wanted[name] - got[name]).square().mean() / wanted[name].square().mean()
        assert 0 < error.sqrt() < 0.05
    assert (tmp_path / "int8" / WEIGHTS).stat().st_size < 0.3 * (tmp_path / WEIGHTS).stat().st_size


def test_a_row_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    two_layers(tmp_path)
    session = rewritten(tmp_path, tmp_path / "int8", static=False)
    x, ids = torch.from_numpy(GENERATOR.normal(size=(5, 96)).astype(np.float32)), torch.tensor([1])
    x[3] *= 1000  # one scale for all rows would leave nothing of the others
    together = session({"x": x, "ids": ids})["y"]
    for row in range(len(x)):
        assert torch.equal(session({"x": x[row : row + 1], "ids": ids})["y"][0], together[row])


def test_reduced_weights_cannot_overflow_pairs_of_products() -> None:
    weight = GENERATOR.normal(size=(64, 32)).astype(np.float32)
    for largest in (REDUCED, FULL):
        whole, scale = quantize_weight(weight, largest)
        assert np.abs(whole).max(axis=0).tolist() == [largest] * 32
        assert np.abs(whole * scale - weight).max() <= scale.max() / 2 + 1e-6
    assert 2 * 255 * REDUCED <= 32767 < 2 * 255 * FULL


def test_bytes_hold_what_they_should() -> None:
    whole, scale = rows_in_int8(np.array([[0.0, 0.0], [1.0, -2.0]], np.float32))
    assert whole.tolist() == [[0, 0], [64, -127]]
    assert np.allclose((whole * scale)[1], [1.0, -2.0], atol=0.01)
    assert spread((0.0, 0.0))[0] > 0
    for within in ((-1.0, 3.0), (0.5, 3.0)):
        step, zero = spread(within)
        assert 0 <= zero <= 255
        assert (255 - zero) * step == pytest.approx(max(within[1], 0.0), abs=step)


def test_layers_that_eight_bits_hurt_are_found(tmp_path: Path) -> None:
    """One frame a thousand times as loud takes the range of all others, where there is one range; not row by row."""
    graphs = two_layers(tmp_path, "Sinh")
    x = 0.1 * GENERATOR.normal(size=(64, 96)).astype(np.float32)
    x[7] *= 10  # sinh makes thousands of it
    feeds = {"ctc": [{"x": x, "ids": np.array([0])}]}
    static = Calibration(tmp_path, graphs, feeds)
    assert static.measure(REDUCED, static=True)["B"] > 0.3
    low, high = static.ranges["ctc"]["t"]
    assert high - low > 200  # smoothed
    errors = Calibration(tmp_path, graphs, feeds).measure(REDUCED, static=False)
    assert errors.keys() == {"A", "B"}
    assert max(errors.values()) < 0.05


def test_loud_channels_leave_others_their_bits(tmp_path: Path) -> None:
    graphs = two_layers(tmp_path)
    x = GENERATOR.normal(size=(64, 96)).astype(np.float32)
    x[:, 5] *= 200
    feeds = {"ctc": [{"x": x, "ids": np.array([0])}]}
    calibration = Calibration(tmp_path, graphs, feeds)
    error = calibration.measure(REDUCED, static=True)["A"]
    factors = calibration.smoothing["A"]
    assert factors.argmax() == 5
    assert np.array_equal(calibration.smoothing["B"], np.ones(128))  # its columns are looked up too
    model = onnx.load(str(tmp_path / "ctc.onnx"), load_external_data=False)
    rewriter = Rewriter(model, tmp_path, {"B"}, REDUCED)
    rewriter.static(calibration.ranges["ctc"], calibration.smoothing)
    (tmp_path / "int8").mkdir()
    with WeightsFile(tmp_path / "int8") as file:
        file.write(model, "ctc.onnx", tmp_path)
    after = Session(tmp_path / "int8" / "ctc.onnx", resolve("cpu"), CPU)
    inputs = {"x": torch.from_numpy(x), "ids": torch.tensor([3, 0])}
    wanted, got = Session(tmp_path / "ctc.onnx", resolve("cpu"), CPU)(inputs), after(inputs)
    assert float((wanted["y"] - got["y"]).norm() / wanted["y"].norm()) < 0.1
    plain = Calibration(tmp_path, graphs, feeds)
    plain._factors = lambda _, inputs: np.ones_like(inputs)  # type: ignore[method-assign]
    assert error < 0.3 * plain.measure(REDUCED, static=True)["A"]


def test_what_stays_is_in_half_precision_if_that_is_the_same(tmp_path: Path) -> None:
    two_layers(tmp_path)
    before = onnx.load(str(tmp_path / "ctc.onnx"))
    published = {each.name: numpy_helper.to_array(each).astype(np.float16) for each in before.graph.initializer}
    published["B"] = published["B"].astype(np.float32) + np.float32(1e-6)  # not the same
    del before.graph.initializer[:]
    values = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in published.items()]
    before.graph.initializer.extend(values)
    (tmp_path / "half").mkdir()
    with WeightsFile(tmp_path / "half") as file:
        Rewriter(before, tmp_path, {"A", "B"}, REDUCED).dynamic()
        file.write(before, "ctc.onnx", tmp_path)
    assert {tensor.name for tensor in before.graph.initializer} == {"A.half", "B"}
    inputs = {"x": torch.from_numpy(GENERATOR.normal(size=(4, 96)).astype(np.float32)), "ids": torch.tensor([3, 0])}
    found = Session(tmp_path / "half" / "ctc.onnx", resolve("cpu"), CPU)(inputs)["y"]
    wanted = np.tanh(inputs["x"].numpy() @ published["A"].astype(np.float32)) @ published["B"]
    assert np.allclose(found.numpy(), wanted, atol=1e-4)


def test_a_whisper_in_eight_bits_transcribes(exported: Path, tmp_path: Path) -> None:
    report = quantize("small", catalog.Location(exported), tmp_path / "int8", QuantizeSettings())
    folder = read_onnx_folder(tmp_path / "int8")
    assert folder.scheme == report.scheme == "int8"
    assert report.bytes - 2_200_000 < 0.35 * report.source_bytes  # but for the tokenizer
    graph = onnx.load(str(tmp_path / "int8" / "step.onnx"), load_external_data=False)
    assert matrices(graph).keys() <= set(folder.kept)
    tuned = onnx.load(str(tmp_path / "int8" / "step.cpu.onnx"), load_external_data=False)
    assert {node.op_type for node in tuned.graph.node}.isdisjoint({"MatMulInteger", "Erf"})
    recognizer = load(tmp_path / "int8", device="cpu", precision="int8")
    assert recognizer.transcribe(babble(2.0), sample_rate=SECOND, language="en", vad=False).text
    original = load(exported, device="cpu")
    mel = original.engine.encode([babble(3.0)])[0]
    other = recognizer.engine.encode([babble(3.0)])[0]
    assert float((mel - other).norm() / mel.norm()) < 0.2


def manifest(folder: Path, texts: list[str]) -> Path:
    rows = []
    for number, text in enumerate(texts):
        soundfile.write(folder / f"{number}.wav", babble(2.0, number), SECOND)
        rows.append({"audio": f"{number}.wav", "text": text, "lang": "en"})
    path = folder / "manifest.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_words_are_counted_and_too_many_errors_refused(ctc: tuple[Path, Path], tmp_path: Path, scheme: Any) -> None:
    rows = manifest(tmp_path, ["a b", "c d e"])
    settings = QuantizeSettings(scheme=scheme, manifest=str(rows), max_wer_change=1000.0)
    report: QuantizeReport = quantize("onnx", catalog.Location(ctc[1]), tmp_path / "out", settings)
    assert report.before is not None
    assert report.after is not None
    assert report.before.words == 5
    assert report.wer_change == pytest.approx(report.after.wer - report.before.wer)
    assert report.as_json()["size_ratio"] < 1
    strict = QuantizeSettings(scheme=scheme, manifest=str(rows), max_wer_change=-1000.0)
    with pytest.raises(ModelError, match="nothing was written") as caught:
        quantize("onnx", catalog.Location(ctc[1]), tmp_path / "refused", strict)
    assert ("take --scheme int8," in str(caught.value)) == (scheme == "int8-static")
    assert not (tmp_path / "refused").exists()


def test_layers_may_all_be_kept(ctc: tuple[Path, Path], tmp_path: Path) -> None:
    report = quantize("onnx", catalog.Location(ctc[1]), tmp_path / "out", QuantizeSettings(sensitive=0.0))
    assert len(report.kept) == len(report.errors) > 5
    clip = babble(3.0)
    ours, theirs = (
        load(folder, device="cpu").transcribe(clip, sample_rate=SECOND, vad=False).text
        for folder in (ctc[1], tmp_path / "out")
    )
    assert ours == theirs


def test_four_bit_weights_are_the_ones_that_were_judged(tmp_path: Path) -> None:
    config = WhisperConfig(80, 51865, 64, 1, 2, 2, 4, text_context=64)  # groups of 64 inputs fill its rows
    weights = {name: 0.2 * value if value.ndim > 1 else value for name, value in random_weights(config=config).items()}
    folder = write_huggingface(tmp_path / "small", weights, config=config)
    (folder / "tokenizer.json").symlink_to(a_tokenizer())
    settings = QuantizeSettings(scheme="int4", sensitive=0.1)
    report = quantize("small", catalog.Location(folder), tmp_path / "int4", settings)
    assert 0 < len(report.kept) < len(report.errors)
    limit = 0.1 * sum(report.errors.values())
    assert set(report.kept) == {name for name, error in report.errors.items() if error > limit}
    opened = open_checkpoint(tmp_path / "int4")
    assert opened.scheme == "int4"
    assert opened.stored is not None
    model = load_whisper(opened, torch.float32, torch.device("cpu"))
    on_gpu = load_whisper(opened, torch.float16, torch.device("cpu"), quantizer("int4", opened.stored))
    original = dict(open_checkpoint(folder).read())
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        stored, theirs = opened.stored(path), on_gpu.get_submodule(path)
        assert isinstance(theirs, QuantizedLinear)
        assert isinstance(stored, Quantized)
        assert stored.bits == (8 if role(path) in report.kept else 4)
        assert torch.equal(theirs.values, stored.values)
        assert torch.equal(module.weight, dequantize(stored))  # on the CPU, the numbers that they stand for
        assert float((module.weight - original[f"{path}.weight"]).norm() / module.weight.norm()) < 0.2
    with load(tmp_path / "int4", device="cpu") as recognizer:
        assert torch.equal(recognizer.engine.encode([babble(1.0)])[0], recognizer.engine.encode([babble(1.0)])[0])
    with pytest.raises(UsageError, match="in int4"):
        load(tmp_path / "int4", device="cpu", precision="bf16")
    with pytest.raises(UsageError, match="in int4 already"):
        quantize("int4", catalog.Location(tmp_path / "int4"), tmp_path / "again", settings)


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper that writes few words."""
    config = WhisperConfig(80, 51865, 32, 1, 2, 1, 2, text_context=16)
    weights = {name: 0.3 * value if value.ndim > 1 else value for name, value in random_weights(config=config).items()}
    folder = write_huggingface(tmp_path_factory.mktemp("brief") / "model", weights, config=config)
    (folder / "tokenizer.json").symlink_to(a_tokenizer())
    return folder


def test_8_bit_floats_are_the_ones_that_were_judged(brief: Path, tmp_path: Path) -> None:
    rows = str(manifest(tmp_path, ["a b"]))
    settings = QuantizeSettings(scheme="fp8", sensitive=0.01, manifest=rows, max_wer_change=1000.0)
    report = quantize("small", catalog.Location(brief), tmp_path / "fp8", settings)
    assert report.after is not None
    limit = 0.01 * sum(report.errors.values())
    worth = {name for name, error in report.errors.items() if error > max(limit, HARMLESS)}
    assert set(report.kept) == worth
    assert {name for name in report.errors if name.startswith("encoder.attention")} == {
        "encoder.attention.qkv",
        "encoder.attention.out",
    }
    opened = open_checkpoint(tmp_path / "fp8")
    assert opened.scheme == "fp8"
    assert opened.stored is not None
    model = load_whisper(opened, torch.float32, torch.device("cpu"))
    on_gpu = load_whisper(opened, torch.bfloat16, torch.device("cpu"), quantizer("fp8", opened.stored))
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        stored, theirs = opened.stored(path), on_gpu.get_submodule(path)
        assert (stored is None) == (role(path, "fp8") in report.kept)
        if stored is None:
            continue
        assert isinstance(stored, Fp8Weight)
        assert torch.equal(module.weight, dequantize_fp8(stored))  # on the CPU, the numbers that they stand for
        if path.startswith("encoder."):
            assert isinstance(theirs, Fp8Linear)
            assert torch.equal(theirs.values.view(torch.uint8), stored.values.view(torch.uint8))
        else:
            assert torch.equal(theirs.weight, dequantize_fp8(stored, torch.bfloat16))  # type: ignore[arg-type]
    with load(tmp_path / "fp8", device="cpu", precision="bf16") as recognizer:
        assert recognizer.engine.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="fp8 needs a GPU"):
        load(tmp_path / "fp8", device="cpu", precision="fp8")
    with pytest.raises(UsageError, match="in fp8 already"):
        quantize("fp8", catalog.Location(tmp_path / "fp8"), tmp_path / "again", settings)
    strict = QuantizeSettings(scheme="fp8", manifest=rows, max_wer_change=-1000.0)
    with pytest.raises(ModelError, match="nothing was written"):
        quantize("small", catalog.Location(brief), tmp_path / "refused", strict)


def test_words_are_counted_as_a_gpu_would_write_them(brief: Path, tmp_path: Path) -> None:
    """The encoder that is judged on the CPU rounds what a GPU's encoder rounds."""
    quantize("small", catalog.Location(brief), tmp_path / "fp8", QuantizeSettings(scheme="fp8", sensitive=1.0))
    opened = open_checkpoint(tmp_path / "fp8")
    on_gpu = load_whisper(opened, torch.bfloat16, torch.device("cpu"), quantizer("fp8", opened.stored))
    mel = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(1))
    with load(tmp_path / "fp8", device="cpu") as recognizer, torch.inference_mode():
        before = recognizer.engine.model.encoder(mel)
        as_on_a_gpu(recognizer, tmp_path / "fp8")
        found = recognizer.engine.model.encoder(mel)
        wanted = GpuEncoder(on_gpu.encoder, torch.float8_e4m3fn)(mel.bfloat16()).float()
    assert not torch.allclose(found, before, atol=1e-4)
    assert float((found - wanted).norm()) < 0.5 * float((before - wanted).norm()) + 0.02 * float(wanted.norm())


@pytest.mark.parametrize("precision", ["int4", "fp8"])
def test_rounding_weights_leaves_them_as_they_were(whisper: WhisperCheckpoint, precision: Any) -> None:
    network = load_whisper(whisper, torch.float32, torch.device("cpu"))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    tokens = torch.tensor([[50258, 50259, 50359, 50363, 11, 12, 13]])
    passages = [Passage(torch.randn(1, 80, 3000), tokens, 3)]
    errors = measure_roles(network, passages, precision)
    assert not any(module._forward_pre_hooks for module in network.modules())
    assert ("encoder.attention.qkv" in errors) == ("decoder.embedding" in errors) == (precision == "fp8")
    assert all(error > 0 for error in errors.values())
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
