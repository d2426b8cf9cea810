"""Agreement, its baseline and Kendall's τ of one row without padding, as their equations read."""

import itertools
import math
from fractions import Fraction


def row_agreement(u, v, percent=5):
    best = max(range(len(u)), key=lambda position: u[position])  # the first of several
    higher = sum(value > v[best] for value in v)
    return float(higher < Fraction(percent, 100) * len(v))


def row_chance(v, percent=5):
    """Mean over all orders of v."""
    u = [1.0] + [0.0] * (len(v) - 1)
    orders = list(itertools.permutations(v))
    return sum(row_agreement(u, order, percent) for order in orders) / len(orders)


def row_kendall_tau(u, v):
    concordance = untied_u = untied_v = 0
    for i, j in itertools.combinations(range(len(u)), 2):
        order_u = (u[i] > u[j]) - (u[i] < u[j])
        order_v = (v[i] > v[j]) - (v[i] < v[j])
        concordance += order_u * order_v
        untied_u += abs(order_u)
        untied_v += abs(order_v)
    return concordance / math.sqrt(untied_u * untied_v) if untied_u and untied_v else math.nan
