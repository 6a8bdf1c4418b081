"""hvdtrain.effnet or bert, with options for what the program chooses, too: argv: effnet or bert, then its words.

The stem of effnet halves the digits, which takes half the time.
"""

import runpy
import sys

from hvdtrain.settings import command_line

command_line.chosen = lambda _: {}
program = sys.argv.pop(1)
sys.argv[1:1] = ["--stem-stride", "2"] if program == "effnet" else []
runpy.run_module(f"hvdtrain.{program}", run_name="__main__", alter_sys=True)
