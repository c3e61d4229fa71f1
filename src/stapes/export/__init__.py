"""Models for other runtimes: ONNX, fewer bits, MIGraphX and TensorRT."""
