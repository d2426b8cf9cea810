# Licensed under the Apache License, Version 2.0.
"""Kernels of `distillation_kernel`, in Triton, which is imported with this file.

Triton is optional: without it, this file can be loaded, and has no kernels.
"""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


if triton is not None:
    from .guidance_triton import score_tile

    @triton.jit
    def _vectors(tensor, places, count, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
        """Vectors at some places of a contiguous tensor of `count` vectors."""
        dims = tl.arange(0, BLOCK_SIZE)
        is_there = (places < count)[:, None] & (dims < SIZE)[None, :]
        return tl.load(tensor + places[:, None] * SIZE + dims[None, :], mask=is_there, other=0.0)

    @triton.jit
    def pair_statistics(
        left,
        right,
        other_left,
        other_right,
        key_mask,
        sums,
        heads,
        num_rows,
        length,
        plane,
        scaling,
        softcap,
        other_scaling,
        other_softcap,
        IS_SQUARED: tl.constexpr,
        BEFORE: tl.constexpr,
        AFTER: tl.constexpr,
        HAS_CAP: tl.constexpr,
        SIZE: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        PRECISION: tl.constexpr,
        OTHER_BEFORE: tl.constexpr,
        OTHER_AFTER: tl.constexpr,
        OTHER_HAS_CAP: tl.constexpr,
        OTHER_SIZE: tl.constexpr,
        OTHER_BLOCK_SIZE: tl.constexpr,
        OTHER_PRECISION: tl.constexpr,
        HAS_MASK: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
    ):
        block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        right += place * length * SIZE
        other_right += place * length * OTHER_SIZE
        key_mask += place // heads * length
        own = _vectors(left + place * num_rows * SIZE, rows, num_rows, SIZE, BLOCK_SIZE)
        other = _vectors(other_left + place * num_rows * OTHER_SIZE, rows, num_rows, OTHER_SIZE, OTHER_BLOCK_SIZE)
        top = tl.full([BLOCK_ROWS], -3.0e38, tl.float32)
        other_top = tl.full([BLOCK_ROWS], -3.0e38, tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        other_total = tl.zeros([BLOCK_ROWS], tl.float32)
        difference = tl.zeros([BLOCK_ROWS], tl.float32)
        squares = tl.zeros([BLOCK_ROWS], tl.float32)
        products = tl.zeros([BLOCK_ROWS], tl.float32)
        other_squares = tl.zeros([BLOCK_ROWS], tl.float32)
        low, high = 0, length
        if BEFORE >= 0:
            low = tl.maximum(0, block * BLOCK_ROWS - BEFORE) // BLOCK_KEYS * BLOCK_KEYS
        if AFTER >= 0:
            high = tl.minimum(length, block * BLOCK_ROWS + BLOCK_ROWS + AFTER)
        for start in range(low, high, BLOCK_KEYS):
            keys = start + tl.arange(0, BLOCK_KEYS)
            scores, visible = score_tile(
                own, _vectors(right, keys, length, SIZE, BLOCK_SIZE), rows, keys, key_mask, num_rows, length, scaling,
                softcap, BEFORE, AFTER, HAS_CAP, HAS_MASK, PRECISION,
            )  # fmt: skip
            other_scores, is_taught = score_tile(
                other, _vectors(other_right, keys, length, OTHER_SIZE, OTHER_BLOCK_SIZE), rows, keys, key_mask,
                num_rows, length, other_scaling, other_softcap, OTHER_BEFORE, OTHER_AFTER, OTHER_HAS_CAP, HAS_MASK,
                OTHER_PRECISION,
            )  # fmt: skip
            is_taught = is_taught & visible
            masked = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(masked, 1))
            weights, shrink = tl.exp(masked - new_top[:, None]), tl.exp(top - new_top)
            other_masked = tl.where(is_taught, other_scores, float("-inf"))
            new_other_top = tl.maximum(other_top, tl.max(other_masked, 1))
            taught, other_shrink = tl.exp(other_masked - new_other_top[:, None]), tl.exp(other_top - new_other_top)
            before = other_total
            total = total * shrink + tl.sum(weights, 1)
            other_total = other_total * other_shrink + tl.sum(taught, 1)
            if IS_SQUARED:
                squares = squares * shrink * shrink + tl.sum(weights * weights, 1)
                products = products * shrink * other_shrink + tl.sum(weights * taught, 1)
                other_squares = other_squares * other_shrink * other_shrink + tl.sum(taught * taught, 1)
            else:
                # Scores relative to the largest ones, since scores may be large, and their differences small.
                moved = (new_other_top - other_top) - (new_top - top)
                apart = (other_scores - new_other_top[:, None]) - (scores - new_top[:, None])
                difference = (difference - before * moved) * other_shrink
                difference += tl.sum(tl.where(is_taught, taught * apart, 0.0), 1)
            top, other_top = new_top, new_other_top
        is_row = rows < num_rows
        sums += place * num_rows + rows
        # Rows that see no key have no loss.
        total = tl.where(total > 0, total, 1.0)
        other_total = tl.where(other_total > 0, other_total, 1.0)
        inverse, other_inverse = 1 / total, 1 / other_total
        tl.store(sums, top + tl.log(total), mask=is_row)
        tl.store(sums + plane, other_top + tl.log(other_total), mask=is_row)
        if IS_SQUARED:
            tl.store(sums + 2 * plane, squares * inverse * inverse, mask=is_row)
            tl.store(sums + 3 * plane, products * inverse * other_inverse, mask=is_row)
            tl.store(sums + 4 * plane, other_squares * other_inverse * other_inverse, mask=is_row)
        else:
            divergence = difference * other_inverse - tl.log(other_total) + tl.log(total)
            tl.store(sums + 2 * plane, divergence, mask=is_row)

    @triton.jit
    def pair_gradients(
        left,
        right,
        other_left,
        other_right,
        key_mask,
        coefficients,
        gradient,
        heads,
        num_rows,
        length,
        plane,
        scaling,
        softcap,
        other_scaling,
        other_softcap,
        OF_KEYS: tl.constexpr,
        IS_SQUARED: tl.constexpr,
        BEFORE: tl.constexpr,
        AFTER: tl.constexpr,
        HAS_CAP: tl.constexpr,
        SIZE: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        PRECISION: tl.constexpr,
        OTHER_BEFORE: tl.constexpr,
        OTHER_AFTER: tl.constexpr,
        OTHER_HAS_CAP: tl.constexpr,
        OTHER_SIZE: tl.constexpr,
        OTHER_BLOCK_SIZE: tl.constexpr,
        OTHER_PRECISION: tl.constexpr,
        HAS_MASK: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
    ):
        """Gradient with respect to a block of `left` or of `right`, which each program owns."""
        block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
        left += place * num_rows * SIZE
        right += place * length * SIZE
        other_left += place * num_rows * OTHER_SIZE
        other_right += place * length * OTHER_SIZE
        key_mask += place // heads * length
        coefficients += place * num_rows
        # Both sides have blocks of one size.
        mine = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        if OF_KEYS:
            low, high, count = 0, num_rows, length
            if AFTER >= 0:
                low = tl.maximum(0, block * BLOCK_KEYS - AFTER) // BLOCK_ROWS * BLOCK_ROWS
            if BEFORE >= 0:
                high = tl.minimum(num_rows, block * BLOCK_KEYS + BLOCK_KEYS + BEFORE)
        else:
            low, high, count = 0, length, num_rows
            if BEFORE >= 0:
                low = tl.maximum(0, block * BLOCK_ROWS - BEFORE) // BLOCK_KEYS * BLOCK_KEYS
            if AFTER >= 0:
                high = tl.minimum(length, block * BLOCK_ROWS + BLOCK_ROWS + AFTER)
        result = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)
        for start in range(low, high, BLOCK_KEYS):
            theirs = start + tl.arange(0, BLOCK_KEYS)
            rows, keys = (theirs, mine) if OF_KEYS else (mine, theirs)
            own_rows = _vectors(left, rows, num_rows, SIZE, BLOCK_SIZE)
            own_keys = _vectors(right, keys, length, SIZE, BLOCK_SIZE)
            scores, visible = score_tile(
                own_rows, own_keys, rows, keys, key_mask, num_rows, length, scaling, softcap, BEFORE, AFTER, HAS_CAP,
                HAS_MASK, PRECISION,
            )  # fmt: skip
            other_scores, is_taught = score_tile(
                _vectors(other_left, rows, num_rows, OTHER_SIZE, OTHER_BLOCK_SIZE),
                _vectors(other_right, keys, length, OTHER_SIZE, OTHER_BLOCK_SIZE), rows, keys, key_mask, num_rows,
                length, other_scaling, other_softcap, OTHER_BEFORE, OTHER_AFTER, OTHER_HAS_CAP, HAS_MASK,
                OTHER_PRECISION,
            )  # fmt: skip
            is_taught = is_taught & visible
            is_row = rows < num_rows
            lse = tl.load(coefficients + rows, mask=is_row, other=0.0)
            other_lse = tl.load(coefficients + plane + rows, mask=is_row, other=0.0)
            weight = tl.load(coefficients + 2 * plane + rows, mask=is_row, other=0.0)
            attention = tl.where(visible, tl.exp(tl.where(visible, scores - lse[:, None], 0.0)), 0.0)
            taught = tl.where(is_taught, tl.exp(tl.where(is_taught, other_scores - other_lse[:, None], 0.0)), 0.0)
            slope = attention - taught
            if IS_SQUARED:
                overlap = tl.load(coefficients + 3 * plane + rows, mask=is_row, other=0.0)
                slope = 2 * attention * (slope - overlap[:, None])
            if HAS_CAP:
                bent = scores / softcap
                slope = slope * (1 - bent * bent)
            slope = slope * weight[:, None]
            if OF_KEYS:
                result += tl.dot(tl.trans(slope).to(own_rows.dtype), own_rows, input_precision=PRECISION)
            else:
                result += tl.dot(slope.to(own_keys.dtype), own_keys, input_precision=PRECISION)
        dims = tl.arange(0, BLOCK_SIZE)
        gradient += (place * count + mine[:, None]) * SIZE + dims[None, :]
        tl.store(gradient, result * scaling, mask=(mine < count)[:, None] & (dims < SIZE)[None, :])
