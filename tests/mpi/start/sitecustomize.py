"""Python imports this first in each process of a launcher: a rank becomes the stand-in of a fork of forkserver.py."""

import os
import re
import signal
import sys
import time

# Stand-ins for a training start without torch faster than they fork.
STAND_INS = "place|steps|leave_result|wait_unasked"
FORKED = re.compile(rf"-m hvdtrain\.(effnet|bert|bandwidth) |\S*/(programs|examples)/(?!{STAND_INS})\w+\.py ")

if os.environ.get("TESTS_FORKSERVER") and FORKED.match(" ".join([*sys.orig_argv[1:], ""])):
    import json

    from launch.run.rank import stand_in

    until = time.monotonic() + 60
    while f"@{os.environ['TESTS_FORKSERVER']}" not in open("/proc/net/unix").read() and time.monotonic() < until:  # noqa: PTH123, SIM115
        time.sleep(0.05)  # it still imports
    os.environ.pop("LD_LIBRARY_PATH", None)  # an mpirun that is called by its path, as by hvdlaunch, adds to it
    if facts := os.environ.get("HVDLAUNCH_RANK"):  # else hvdlaunch would import for its own keeper what no start needs
        os.environ["HVDLAUNCH_RANK"] = json.dumps({**json.loads(facts), "keeper": ""})
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # the fork unblocks it when it is ready
    handled = {number: signal.getsignal(number) for number in (*stand_in.not_ignored(), signal.SIGCHLD)}
    wakes = stand_in.wake_at(*handled)
    server, is_leader = os.environ["TESTS_FORKSERVER"], os.getsid(0) == os.getpid()
    if fork := stand_in.ask_keeper(server, sys.executable, sys.orig_argv, in_session=is_leader):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        stand_in.end_as(stand_in.stand_for(fork, wakes))
    signal.set_wakeup_fd(-1)
    for number, handler in handled.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
