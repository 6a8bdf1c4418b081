"""hvdtrain.effnet with a short time limit of a step; started by faults.py."""

from dataclasses import replace

import hvdtrain
from hvdtrain.effnet import main
from hvdtrain.vision.settings import resolve, scaled

HANG_S = 3.0

if __name__ == "__main__":
    hvdtrain.start(main, lambda: replace(scaled(), hang_timeout_s=HANG_S), resolve=resolve)
