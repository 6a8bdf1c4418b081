"""One step and the loop around it: what every training has, whatever it trains and over how many ranks."""
