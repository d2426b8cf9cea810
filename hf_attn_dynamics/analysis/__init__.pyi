# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from .attribution import *
from .checkpoints import checkpoint_timeline as checkpoint_timeline
from .head_scores import HeadScores as HeadScores
from .head_timeline import HeadTimeline as HeadTimeline
from .heads import *
from .lexical import *
from .observers import *
from .pages import *
from .plots import *
from .reading import HeadReading as HeadReading
from .reading import read_heads as read_heads
from .relevance import *
from .score_norm import ScoreNormHistory as ScoreNormHistory
from .score_norm import attended_words as attended_words
from .score_norm import score_norm_curve as score_norm_curve
from .score_norm import score_norm_terms as score_norm_terms
from .score_norm import topic_purity as topic_purity
