"""The recipe of a training: optimizer, schedule, moving average, batch norm."""
