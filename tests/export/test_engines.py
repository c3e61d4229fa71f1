"""Vendors' tools: the commands, what they print, and what happens where they are missing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from stapes.errors import ModelError
from stapes.export import engines


def graph(folder: Path) -> None:
    """A graph with two axes that may change."""
    mel = helper.make_tensor_value_info("mel", TensorProto.FLOAT, ["windows", 80, 3000])
    ids = helper.make_tensor_value_info("tokens", TensorProto.INT64, ["windows", "tokens"])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    nodes = [helper.make_node("Identity", ["mel"], ["out"])]
    made = helper.make_model(helper.make_graph(nodes, "g", [mel, ids], [out]))
    (folder / "encoder.onnx").write_bytes(made.SerializeToString())


@pytest.mark.parametrize(("architecture", "half"), [(None, False), ("gfx942", True)])
def test_migraphx_is_told_every_shape(tmp_path: Path, architecture: str | None, half: bool) -> None:
    graph(tmp_path)
    made = engines.commands(tmp_path, {"encoder": "encoder.onnx"}, "migraphx", half=half, architecture=architecture)
    command = made["encoder"]
    assert command[:3] == ["migraphx-driver", "compile", str(tmp_path / "encoder.onnx")]
    text = " ".join(command)
    assert "--input-dim @mel 8 80 3000 --input-dim @tokens 8 8" in text
    assert text.endswith(f"--binary -o {tmp_path / 'encoder.mxr'}")
    assert ("--fp16" in command) == half
    assert ("--gpu-arch gfx942" in text) == (architecture is not None)


def test_tensorrt_is_told_the_range_of_shapes(tmp_path: Path) -> None:
    graph(tmp_path)
    sizes = {**engines.SIZES, "windows": 16}
    (command,) = engines.commands(tmp_path, {"encoder": "encoder.onnx"}, "tensorrt", half=True, sizes=sizes).values()
    assert command[0] == "trtexec"
    assert f"--onnx={tmp_path / 'encoder.onnx'}" in command
    assert "--minShapes=mel:1x80x3000,tokens:1x1" in command
    assert "--optShapes=mel:16x80x3000,tokens:16x8" in command
    assert "--maxShapes=mel:16x80x3000,tokens:16x8" in command
    assert "--fp16" in command


def test_an_axis_without_a_size_is_said(tmp_path: Path) -> None:
    graph(tmp_path)
    with pytest.raises(ModelError, match="'windows'"):
        engines.commands(tmp_path, {"encoder": "encoder.onnx"}, "migraphx", half=False, sizes={"tokens": 1})


def test_where_the_tool_is_missing_its_commands_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["migraphx-driver", "compile", str(tmp_path / "encoder.onnx"), "-o", str(tmp_path / "encoder.mxr")]
    results, missing = engines.build_engines(tmp_path, "migraphx", {"encoder": command})
    assert missing is not None
    assert "migraphx-driver is not installed" in missing
    assert results[0].engine is None
    script = tmp_path / "build-migraphx.sh"
    assert str(script) in missing
    assert script.stat().st_mode & stat.S_IXUSR
    assert "migraphx-driver compile encoder.onnx -o encoder.mxr\n" in script.read_text()  # moves with its folder


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_what_the_tool_makes_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "trtexec", "echo '&&&& PASSED TensorRT.trtexec'; : > encoder.engine")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    results, missing = engines.build_engines(tmp_path, "tensorrt", {"encoder": ["trtexec", "--onnx=encoder.onnx"]})
    assert missing is None
    assert (results[0].engine, results[0].failure) == ("encoder.engine", None)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo '[I] Building'; echo '[E] Error[4]: no kernel for Gather'; exit 1", "no kernel for Gather"),
        ("echo '&&&& PASSED TensorRT.trtexec'", "wrote no encoder.engine"),
        ("exit 3", "code 3"),
    ],
)
def test_a_tool_that_fails_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    tool(tmp_path, "trtexec", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    results, missing = engines.build_engines(tmp_path, "tensorrt", {"encoder": ["trtexec"]})
    assert missing is None
    assert results[0].engine is None
    assert reason in str(results[0].failure)


def test_what_tools_print_is_read() -> None:
    passed = (
        "[I] Throughput: 40.1 qps\n[I] GPU Compute Time: min = 24.1 ms, max = 25.9 ms, mean = 24.8 ms, median = 24.7 ms"
        "\n&&&& PASSED TensorRT.trtexec [TensorRT v100300] # trtexec --onnx=e.onnx\n"
    )
    assert engines.read_trtexec(passed, 0) == (None, 24.8)
    assert engines.read_trtexec("[E] Engine could not be created\n&&&& FAILED", 1)[0] == "Engine could not be created"
    assert engines.read_trtexec("done", 0)[0] == "done"  # neither passed nor failed: not believed
    assert engines.read_migraphx("Compiling ...\nTotal time: 3.25ms\n", 0) == (None, 3.25)
    failed = "Reading: e.onnx\nterminate called\n  what():  parse_node: Unknown operator: Foo\nAborted\n"
    assert "Unknown operator: Foo" in str(engines.read_migraphx(failed, 134)[0])
