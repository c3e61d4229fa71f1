"""Machines with the wrong package, or one that fails when it is tried, with what must be said of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from machines import (
    CPU_TORCH,
    GIB,
    LINUX,
    ORT_CPU,
    PARITY,
    Case,
    amd,
    cuda_torch,
    gpu,
    machine,
    nodes,
    nvidia,
    radeon,
    rocm_torch,
    strix,
)

from stapes.diagnostics.facts import CTranslate2, Onnx, OnnxProvider, Parity, Torch, TorchDevice, Triton


def device(**changes: Any) -> TorchDevice:
    return gpu("gfx1100", "AMD Radeon RX 7900 XTX", **changes)


def onnx(*providers: OnnxProvider, flavours: tuple[str, ...] = ("onnxruntime-migraphx",)) -> Onnx:
    return Onnx("1.27.1", flavours, (*providers, ORT_CPU))


ENGINE_CASES = [
    # The wrong wheel
    Case(
        "CUDA wheel on an AMD machine",
        radeon(torch=cuda_torch(failure="RuntimeError: Found no NVIDIA driver on your system.")),
        "problem",
        "built for NVIDIA's CUDA, and this machine has gfx1100",
        "--torch-backend=rocm7.2",
    ),
    Case(
        "CUDA wheel beside an AMD GPU whose rights are missing too",
        radeon(torch=cuda_torch(), nodes=nodes("EACCES")),
        "problem",
        "built for NVIDIA's CUDA",
        "torch-backend",
    ),
    Case(
        "CPU wheel on an AMD machine",
        radeon(torch=CPU_TORCH),
        "problem",
        "built for the CPU only, and this machine has gfx1100",
        "rocm7.2",
    ),
    Case(
        "CPU wheel on a GPU that pytorch.org does not build for",
        amd("gfx1103", "AMD Radeon 780M", torch=CPU_TORCH),
        "problem",
        "gfx1103",
        r"torch\[device-gfx1103\]",
    ),
    Case(
        "ROCm wheel on an NVIDIA machine",
        nvidia(torch=rocm_torch()),
        "problem",
        "built for ROCm, and this machine has an NVIDIA GPU",
        "pip install --force-reinstall torch",
    ),
    Case(
        "CPU wheel on an NVIDIA machine",
        nvidia(torch=CPU_TORCH),
        "problem",
        "built for the CPU only, and this machine has an NVIDIA GPU",
        "pip install --force-reinstall torch",
    ),
    Case(
        "wheel newer than the machine's ROCm libraries",
        radeon(
            torch=Torch(
                failure="ImportError: libtorch_hip.so: undefined symbol: hsa_amd_enable_logging, version ROCR_1"
            )
        ),
        "problem",
        "ROCm libraries of this machine are older",
        "LD_LIBRARY_PATH",
    ),
    # What is tried and fails
    Case(
        "no kernels for this GPU",
        amd(
            "gfx1103",
            "AMD Radeon 780M",
            torch=rocm_torch(
                gpu("gfx1103", "AMD Radeon 780M", failure="RuntimeError: HIP error: invalid device function")
            ),
        ),
        "problem",
        "no kernels for gfx1103",
        r"torch\[device-gfx1103\]",
    ),
    Case(
        "NVIDIA GPU that the wheel has left behind",
        nvidia(
            torch=cuda_torch(
                gpu("sm_61", "NVIDIA GeForce GTX 1080", kind="cuda", failure="AcceleratorError: no kernel image")
            )
        ),
        "problem",
        "no kernels for sm_61",
        "another CUDA",
    ),
    Case(
        "Strix Halo that crashes",
        strix(
            torch=rocm_torch(gpu("gfx1151", "AMD Radeon 8060S Graphics", failure="crashed (SIGSEGV)")),
            system=replace(LINUX, kernel="6.14.0"),
        ),
        "problem",
        r"crashed \(SIGSEGV\)",
        "amdgpu.cwsr_enable=0",
    ),
    Case(
        "GPU that hangs",
        radeon(torch=rocm_torch(device(failure="crashed (SIGABRT): HW Exception by GPU node-1 reason :GPU Hang"))),
        "problem",
        "the GPU hung",
        "6.18.4",
    ),
    Case(
        "attention without fused kernels",
        radeon(torch=rocm_torch(device(attention="math", attention_refused={"flash": "is still experimental"}))),
        "warning",
        "falls to PyTorch's `math`.*experimental",
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1",
    ),
    Case(
        "attention without fused kernels, experimental or not",
        radeon(
            torch=rocm_torch(device(attention="math")), environment={"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}
        ),
        "warning",
        "math",
        "newer PyTorch",
    ),
    Case(
        "attention on RDNA 2",
        amd(
            "gfx1030",
            "AMD Radeon RX 6800 XT",
            torch=rocm_torch(gpu("gfx1030", "AMD Radeon RX 6800 XT", attention="math")),
        ),
        "warning",
        "math",
        "nothing yet: AOTriton has no kernels for gfx1030",
    ),
    Case(
        "LSTM that is silently wrong",
        radeon(torch=rocm_torch(device(parity=(Parity("LSTM", False, 0.4), PARITY[1])))),
        "warning",
        r"LSTM is wrong: off by 4.0e-01 .*#177834",
        "cudnn.enabled = False",
    ),
    Case(
        "LSTM that MIOpen refuses",
        radeon(
            torch=rocm_torch(
                device(parity=(Parity("LSTM", False, failure="RuntimeError: miopenStatusUnknownError"), PARITY[1]))
            )
        ),
        "warning",
        "MIOpen failed",
        "cudnn.enabled = False",
    ),
    Case(
        "LSTM that is slow",
        radeon(torch=rocm_torch(device(parity=(Parity("LSTM", True, 3e-7, 0.9), PARITY[1])))),
        "note",
        "an LSTM takes 900 ms, and 10 on the CPU",
        "on the CPU",
    ),
    Case(
        "convolution that is wrong",
        radeon(torch=rocm_torch(device(parity=(PARITY[0], Parity("convolution (log-mel)", False, float("nan")))))),
        "problem",
        "convolution .* is wrong",
        "cudnn.enabled = False",
    ),
    Case(
        "graphs that replay something else",
        radeon(torch=rocm_torch(device(graphs=(False, "replay 1 of a captured step differs from eager by 0.5")))),
        "warning",
        "replay 1 .* decodes without graphs",
        "update PyTorch",
    ),
    Case(
        "GPU that another program has filled",
        radeon(torch=rocm_torch(device(free_bytes=GIB // 2))),
        "warning",
        "0.5 of 24 GiB are free",
        "stapes monitor",
    ),
    # Other engines
    Case(
        "ONNX Runtime that fell back: libraries of MIGraphX missing",
        radeon(
            onnx=onnx(
                OnnxProvider(
                    "MIGraphXExecutionProvider",
                    False,
                    (),
                    "RuntimeError: libmigraphx_c.so.3: cannot open shared object file",
                )
            )
        ),
        "problem",
        "fall back to the CPU without an error: the package needs a ROCm",
        "install ROCm",
    ),
    Case(
        "ONNX Runtime that fell back and says nothing",
        radeon(
            onnx=onnx(
                OnnxProvider(
                    "MIGraphXExecutionProvider",
                    False,
                    ("CPUExecutionProvider",),
                    "the session runs on CPUExecutionProvider instead",
                )
            )
        ),
        "problem",
        "MIGraphXExecutionProvider .*instead",
        "migraphx-driver --version",
    ),
    Case(
        "two flavours of ONNX Runtime",
        radeon(onnx=onnx(flavours=("onnxruntime", "onnxruntime-migraphx"))),
        "problem",
        "onnxruntime and onnxruntime-migraphx are installed together",
        "pip uninstall -y onnxruntime onnxruntime-migraphx && pip install onnxruntime-migraphx",
    ),
    Case(
        "NVIDIA's ONNX Runtime on an AMD machine",
        radeon(
            onnx=onnx(
                OnnxProvider("CUDAExecutionProvider", False, (), "RuntimeError: libcublasLt.so.12: cannot open"),
                flavours=("onnxruntime-gpu",),
            )
        ),
        "problem",
        "NVIDIA's flavour on an AMD machine",
        "pip install onnxruntime-migraphx",
    ),
    Case(
        "the ROCm provider that was removed",
        radeon(
            onnx=onnx(
                OnnxProvider("ROCMExecutionProvider", False, (), "RuntimeError: librocm_smi64.so.1"),
                flavours=("onnxruntime-rocm",),
            )
        ),
        "problem",
        "ROCMExecutionProvider",
        "removed in ONNX Runtime 1.23",
    ),
    Case(
        "the CPU's ONNX Runtime on an AMD machine",
        radeon(onnx=onnx(flavours=("onnxruntime",))),
        "note",
        "no provider for AMD GPUs",
        "onnxruntime-migraphx",
    ),
    Case(
        "ONNX Runtime on RDNA 2",
        amd("gfx1030", "AMD Radeon RX 6800 XT", onnx=onnx(flavours=("onnxruntime",))),
        "note",
        "AMD lists no ONNX Runtime for gfx1030",
        "",
    ),
    Case(
        "ONNX Runtime for another NumPy",
        machine(onnx=Onnx(None, ("onnxruntime",), failure="ImportError: numpy.core.multiarray failed to import")),
        "warning",
        "cannot be used",
        "numpy<2",
    ),
    Case(
        "Triton that refuses RDNA 2",
        amd(
            "gfx1030", "AMD Radeon RX 6800 XT", triton=Triton("3.9.0", {"gfx1030": "RuntimeError: unsupported target"})
        ),
        "warning",
        "3.9.0 refuses gfx1030",
        "PyTorch 2.14 or older",
    ),
    Case(
        "Triton missing beside a GPU",
        radeon(triton=Triton(failure="ModuleNotFoundError: No module named 'triton'")),
        "warning",
        "Triton is missing",
        "install PyTorch anew",
    ),
    Case(
        "CTranslate2 without HIP",
        radeon(packages={"ctranslate2": "4.8.5"}, ctranslate2=CTranslate2("4.8.5", 0)),
        "note",
        "CTranslate2 sees no GPU, whatever PyTorch sees",
        "ROCm wheel of CTranslate2",
    ),
    Case(
        "CTranslate2 on Instinct",
        amd("gfx942", "AMD Instinct MI300X", packages={"ctranslate2": "4.8.5"}, ctranslate2=CTranslate2("4.8.5", 0)),
        "note",
        "sees no GPU",
        "no kernels for gfx942",
    ),
    Case(
        "cuda-python on an AMD machine",
        radeon(packages={"cuda-python": "13.0"}),
        "note",
        "without an NVIDIA driver",
        "pip uninstall cuda-python",
    ),
    Case(
        "a probe that failed",
        machine(failures={"pci": "PermissionError: [Errno 13]"}),
        "note",
        "pci could not be looked at: PermissionError",
        "",
    ),
]
