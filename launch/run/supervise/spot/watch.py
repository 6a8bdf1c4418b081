"""Reads the notices of a cloud on the instance itself.

python -m launch.run.supervise.spot.watch CLOUD now            prints the notice; nothing after the mark without one
python -m launch.run.supervise.spot.watch CLOUD follow         prints it once it comes; ends with its reader
python -m launch.run.supervise.spot.watch CLOUD acknowledge    lets the cloud end the instance before the time
"""

import sys
import time
from collections.abc import Iterator

from launch.errors import HostError
from launch.run.supervise.spot.clouds import CLOUDS, Cloud, read_notice

MARK, SILENT = "hvdlaunch-notice ", "hvdlaunch-silent "
MOST_FAILURES = 3  # in a row, before they are reported


def follow(cloud: Cloud) -> Iterator[str]:
    """Yield a line for each look: empty, why several looks in a row have failed, or at last the notice."""
    failures = 0
    while True:
        try:
            if notice := read_notice(cloud):
                yield f"{MARK}{notice}"
                return
            failures = 0
            yield ""
        except HostError as error:
            failures += 1
            yield f"{SILENT}{error}" if failures == MOST_FAILURES else ""
        time.sleep(cloud.pause_s)


def main(name: str, what: str) -> None:
    """Do one of the three."""
    cloud = CLOUDS[name]()
    try:
        if what == "follow":
            for line in follow(cloud):
                print(line, flush=True)  # fails once its reader has ended
        elif what == "now":
            print(f"{MARK}{read_notice(cloud) or ''}", flush=True)
        else:
            cloud.acknowledge()
            print(MARK, flush=True)
    except HostError as error:
        sys.exit(f"hvdlaunch: error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
