"""Copies of what a run's folder holds, for MLflow, TensorBoard, Weights & Biases and OpenTelemetry."""
