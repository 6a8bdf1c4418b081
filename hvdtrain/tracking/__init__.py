"""What a run writes for people: TensorBoard, JSON lines, result, console."""
