"""The records of a run for its users: TensorBoard, JSON lines, result, console."""
