# Licensed under the Apache License, Version 2.0.
"""Kernels of `guidance_kernel`, in Triton, which is imported with this file.

Triton is optional: without it, this file can be loaded, and has no kernels.
"""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


if triton is not None:

    @triton.jit
    def score_tile(
        query,
        key,
        rows,
        keys,
        key_mask,
        num_rows,
        length,
        scaling,
        softcap,
        BEFORE: tl.constexpr,
        AFTER: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_MASK: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """Scores of a tile, and which of them are visible."""
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
        if HAS_CAP:
            small = tl.exp(-2 * tl.abs(scores) / softcap)
            capped = softcap * (1 - small) / (1 + small)
            scores = tl.where(scores < 0, -capped, capped)
        visible = (rows < num_rows)[:, None] & (keys < length)[None, :]
        if BEFORE >= 0:
            visible = visible & (keys[None, :] >= rows[:, None] - BEFORE)
        if AFTER >= 0:
            visible = visible & (keys[None, :] <= rows[:, None] + AFTER)
        if HAS_MASK:
            real = tl.load(key_mask + keys, mask=keys < length, other=0)
            visible = visible & (real != 0)[None, :]
        return scores, visible

    @triton.jit
    def statistics(
        query,
        key,
        key_mask,
        column_weights,
        targets,
        group_of_head,
        sums,
        target_scores,
        query_batch,
        query_head,
        query_row,
        query_dim,
        key_batch,
        key_head,
        key_row,
        key_dim,
        heads,
        num_groups,
        num_rows,
        length,
        num_targets,
        plane,
        scaling,
        softcap,
        BEFORE: tl.constexpr,
        AFTER: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_MASK: tl.constexpr,
        HAS_COLUMNS: tl.constexpr,
        HAS_MASS: tl.constexpr,
        HAS_UNIFORM: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
        sentence, head = place // heads, place % heads
        group = sentence * num_groups + tl.load(group_of_head + head)
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, BLOCK_DIM)
        is_row = rows < num_rows
        query += sentence * query_batch + head * query_head
        key += sentence * key_batch + head * key_head
        key_mask += sentence * length
        column_weights += group * length
        targets += group * num_rows * num_targets
        target_scores += place * num_rows * num_targets
        own = tl.load(
            query + rows[:, None] * query_row + dims[None, :] * query_dim,
            mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        top = tl.full([BLOCK_ROWS], -3.0e38, tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        squares = tl.zeros([BLOCK_ROWS], tl.float32)
        on_target = tl.zeros([BLOCK_ROWS], tl.float32)
        score_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        seen = tl.zeros([BLOCK_ROWS], tl.float32)
        mass_top = tl.full([BLOCK_ROWS], -3.0e38, tl.float32)
        mass = tl.zeros([BLOCK_ROWS], tl.float32)
        all_scores = tl.zeros([BLOCK_ROWS], tl.float32)
        count = tl.zeros([BLOCK_ROWS], tl.float32)
        low, high = 0, length
        if BEFORE >= 0:
            low = tl.maximum(0, block * BLOCK_ROWS - BEFORE) // BLOCK_KEYS * BLOCK_KEYS
        if AFTER >= 0:
            high = tl.minimum(length, block * BLOCK_ROWS + BLOCK_ROWS + AFTER)
        for start in range(low, high, BLOCK_KEYS):
            keys = start + tl.arange(0, BLOCK_KEYS)
            others = tl.load(
                key + keys[:, None] * key_row + dims[None, :] * key_dim,
                mask=(keys < length)[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
            )
            scores, visible = score_tile(
                own, others, rows, keys, key_mask, num_rows, length, scaling, softcap, BEFORE, AFTER, HAS_CAP,
                HAS_MASK, PRECISION,
            )  # fmt: skip
            masked = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(masked, 1))
            weights = tl.exp(masked - new_top[:, None])
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            squares = squares * shrink * shrink + tl.sum(weights * weights, 1)
            if HAS_COLUMNS:
                wanted = tl.load(column_weights + keys, mask=keys < length, other=0.0)
                on_target = on_target * shrink + tl.sum(weights * wanted[None, :], 1)
                score_sum += tl.sum(tl.where(visible, scores * wanted[None, :], 0.0), 1)
                seen += tl.sum(tl.where(visible, wanted[None, :], 0.0), 1)
                if HAS_MASS:
                    inside = tl.where(visible & (wanted != 0)[None, :], scores, float("-inf"))
                    new_mass_top = tl.maximum(mass_top, tl.max(inside, 1))
                    mass = mass * tl.exp(mass_top - new_mass_top) + tl.sum(tl.exp(inside - new_mass_top[:, None]), 1)
                    mass_top = new_mass_top
            if HAS_UNIFORM:
                all_scores += tl.sum(tl.where(visible, scores, 0.0), 1)
                count += tl.sum(tl.where(visible, 1.0, 0.0), 1)
            for number in range(num_targets):
                target = tl.load(targets + rows * num_targets + number, mask=is_row, other=-1)
                hit = visible & (target[:, None] == keys[None, :])
                is_hit = tl.max(tl.where(hit, 1, 0), 1) > 0
                score = tl.sum(tl.where(hit, scores, 0.0), 1)
                tl.store(target_scores + rows * num_targets + number, score, mask=is_hit)
            top = new_top
        sums += place * num_rows + rows
        inverse = 1 / tl.where(total > 0, total, 1.0)
        tl.store(sums, top + tl.log(total), mask=is_row)
        tl.store(sums + plane, squares * inverse * inverse, mask=is_row)
        if HAS_COLUMNS:
            tl.store(sums + 2 * plane, on_target * inverse, mask=is_row)
            tl.store(sums + 3 * plane, score_sum, mask=is_row)
            tl.store(sums + 4 * plane, seen, mask=is_row)
            if HAS_MASS:
                tl.store(sums + 5 * plane, mass_top + tl.log(mass), mask=is_row)
        if HAS_UNIFORM:
            tl.store(sums + 6 * plane, all_scores, mask=is_row)
            tl.store(sums + 7 * plane, count, mask=is_row)

    @triton.jit
    def _score_gradient(
        scores,
        visible,
        rows,
        keys,
        coefficients,
        column_weights,
        targets,
        target_gradients,
        num_rows,
        length,
        num_targets,
        plane,
        softcap,
        HAS_CAP: tl.constexpr,
        HAS_COLUMNS: tl.constexpr,
        HAS_MASS: tl.constexpr,
        HAS_UNIFORM: tl.constexpr,
    ):
        """Gradient of the loss with respect to the scores of a tile, before they are scaled."""
        is_row = rows < num_rows
        by_row = coefficients + rows
        lse = tl.load(by_row, mask=is_row, other=0.0)
        squared = tl.load(by_row + plane, mask=is_row, other=0.0)
        linear = tl.load(by_row + 2 * plane, mask=is_row, other=0.0)
        attention = tl.where(visible, tl.exp(tl.where(visible, scores - lse[:, None], 0.0)), 0.0)
        gradient = attention * (squared[:, None] * attention + linear[:, None])
        if HAS_COLUMNS:
            wanted = tl.load(column_weights + keys, mask=keys < length, other=0.0)
            on_attention = tl.load(by_row + 3 * plane, mask=is_row, other=0.0)
            on_target = tl.load(by_row + 4 * plane, mask=is_row, other=0.0)
            by_column = attention * on_attention[:, None] + tl.where(visible, on_target[:, None], 0.0)
            gradient += by_column * wanted[None, :]
            if HAS_MASS:
                share = tl.load(by_row + 5 * plane, mask=is_row, other=0.0)
                mass_lse = tl.load(by_row + 6 * plane, mask=is_row, other=0.0)
                inside = visible & (wanted != 0)[None, :] & (share != 0)[:, None]
                fraction = tl.exp(tl.where(inside, scores - mass_lse[:, None], 0.0))
                gradient += tl.where(inside, share[:, None] * fraction, 0.0)
        if HAS_UNIFORM:
            uniform = tl.load(by_row + 7 * plane, mask=is_row, other=0.0)
            gradient += tl.where(visible, uniform[:, None], 0.0)
        for number in range(num_targets):
            target = tl.load(targets + rows * num_targets + number, mask=is_row, other=-1)
            own = tl.load(target_gradients + rows * num_targets + number, mask=is_row, other=0.0)
            gradient += tl.where(visible & (target[:, None] == keys[None, :]), own[:, None], 0.0)
        if HAS_CAP:
            bent = scores / softcap
            gradient = gradient * (1 - bent * bent)
        return gradient

    @triton.jit
    def gradients(
        query,
        key,
        key_mask,
        column_weights,
        targets,
        group_of_head,
        coefficients,
        target_gradients,
        gradient,
        query_batch,
        query_head,
        query_row,
        query_dim,
        key_batch,
        key_head,
        key_row,
        key_dim,
        heads,
        num_groups,
        num_rows,
        length,
        num_targets,
        plane,
        scaling,
        softcap,
        OF_KEYS: tl.constexpr,
        BEFORE: tl.constexpr,
        AFTER: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_MASK: tl.constexpr,
        HAS_COLUMNS: tl.constexpr,
        HAS_MASS: tl.constexpr,
        HAS_UNIFORM: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """Gradient with respect to a block of queries, or of keys: each program owns one, and goes over the others."""
        block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
        sentence, head = place // heads, place % heads
        group = sentence * num_groups + tl.load(group_of_head + head)
        dims = tl.arange(0, BLOCK_DIM)
        query += sentence * query_batch + head * query_head
        key += sentence * key_batch + head * key_head
        key_mask += sentence * length
        column_weights += group * length
        targets += group * num_rows * num_targets
        target_gradients += place * num_rows * num_targets
        coefficients += place * num_rows
        if OF_KEYS:
            OWN: tl.constexpr = BLOCK_KEYS
            OTHER: tl.constexpr = BLOCK_ROWS
            last = num_rows
            low, high = 0, num_rows
            if AFTER >= 0:
                low = tl.maximum(0, block * BLOCK_KEYS - AFTER) // BLOCK_ROWS * BLOCK_ROWS
            if BEFORE >= 0:
                high = tl.minimum(num_rows, block * BLOCK_KEYS + BLOCK_KEYS + BEFORE)
        else:
            OWN: tl.constexpr = BLOCK_ROWS
            OTHER: tl.constexpr = BLOCK_KEYS
            last = length
            low, high = 0, length
            if BEFORE >= 0:
                low = tl.maximum(0, block * BLOCK_ROWS - BEFORE) // BLOCK_KEYS * BLOCK_KEYS
            if AFTER >= 0:
                high = tl.minimum(length, block * BLOCK_ROWS + BLOCK_ROWS + AFTER)
        mine = block * OWN + tl.arange(0, OWN)
        is_dim = (dims < HEAD_DIM)[None, :]
        if OF_KEYS:
            is_mine = mine < length
            own = tl.load(
                key + mine[:, None] * key_row + dims[None, :] * key_dim, mask=is_mine[:, None] & is_dim, other=0.0
            )
        else:
            is_mine = mine < num_rows
            own = tl.load(
                query + mine[:, None] * query_row + dims[None, :] * query_dim,
                mask=is_mine[:, None] & is_dim,
                other=0.0,
            )
        result = tl.zeros([OWN, BLOCK_DIM], tl.float32)
        for start in range(low, high, OTHER):
            theirs = start + tl.arange(0, OTHER)
            is_theirs = (theirs < last)[:, None] & is_dim
            if OF_KEYS:
                others = tl.load(
                    query + theirs[:, None] * query_row + dims[None, :] * query_dim, mask=is_theirs, other=0.0
                )
                scores, visible = score_tile(
                    others, own, theirs, mine, key_mask, num_rows, length, scaling, softcap, BEFORE, AFTER, HAS_CAP,
                    HAS_MASK, PRECISION,
                )  # fmt: skip
                slope = _score_gradient(
                    scores, visible, theirs, mine, coefficients, column_weights, targets, target_gradients, num_rows,
                    length, num_targets, plane, softcap, HAS_CAP, HAS_COLUMNS, HAS_MASS, HAS_UNIFORM,
                )  # fmt: skip
                result += tl.dot(tl.trans(slope).to(others.dtype), others, input_precision=PRECISION)
            else:
                others = tl.load(key + theirs[:, None] * key_row + dims[None, :] * key_dim, mask=is_theirs, other=0.0)
                scores, visible = score_tile(
                    own, others, mine, theirs, key_mask, num_rows, length, scaling, softcap, BEFORE, AFTER, HAS_CAP,
                    HAS_MASK, PRECISION,
                )  # fmt: skip
                slope = _score_gradient(
                    scores, visible, mine, theirs, coefficients, column_weights, targets, target_gradients, num_rows,
                    length, num_targets, plane, softcap, HAS_CAP, HAS_COLUMNS, HAS_MASS, HAS_UNIFORM,
                )  # fmt: skip
                result += tl.dot(slope.to(others.dtype), others, input_precision=PRECISION)
        gradient += (place * (length if OF_KEYS else num_rows) + mine[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(gradient, result * scaling, mask=is_mine[:, None] & is_dim)
