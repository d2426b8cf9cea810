# Licensed under the Apache License, Version 2.0.
"""Colours of pictures and pages, which people with colour blindness can tell apart (Okabe and Ito 2008)."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
