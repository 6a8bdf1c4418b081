"""What a step costs on a GPU that is not there: operators, bytes, memory and time, counted by shapes alone."""
