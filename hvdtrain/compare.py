"""Compare run folders: their settings, their results, and whether results differ by more than the spread over seeds."""

from hvdtrain.insight.compare.command import main
from hvdtrain.settings.safety import exits

if __name__ == "__main__":
    exits.run(main)
