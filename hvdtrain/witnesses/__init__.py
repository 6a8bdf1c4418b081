"""Witnesses of a step: who had gradients that are not finite, and what an injected fault does to a loss."""
