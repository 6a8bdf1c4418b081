"""Witnesses of a step: find non-finite gradients, inject faults, skip loss spikes."""
