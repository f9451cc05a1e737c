"""How the kernels of a decode step are laid out: for so many rows of a model of such sizes, from measurements on a Hopper GPU."""

from __future__ import annotations

from typing import NamedTuple

from hybridflow.models.kv_cache import BLOCK_SIZE


class AttentionPlan(NamedTuple):
    """How a launch is laid out: `AttentionPlan(num_splits=4, tile=64, num_warps=4, num_stages=3)`.

    tile: keys read at a time, a multiple of 32. num_stages: tiles under way, and one that is computed with.
    least_keys: keys of a split at least, so that short rows are not split; a multiple of `tile`, since a split begins with one.
    """

    num_splits: int
    tile: int
    num_warps: int
    num_stages: int
    least_keys: int = 128


class ProductPlan(NamedTuple):
    """How a product is laid out: `ProductPlan(rows=32, columns=64, depth=128, splits=4, num_warps=4, num_stages=4)`.

    rows, columns: of a program's tile of the output; of each half where a gate joins two. depth: of a step of the sum, a divisor of the
    input's columns. splits: programs that share a sum. turned: the tile is computed as columns by rows, so that weights take the tensor
    cores' longer side.
    """

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int
    turned: bool = False


class StepPlan(NamedTuple):
    """How a decode step runs.

    joint:     the attention kernel norms, rotates and stores keys and values itself.
    attention: its layout; None lets the kernel choose.
    The products' plans: None leaves one to the library.
    """

    joint: bool = False
    qkv: ProductPlan | None = None
    out: ProductPlan | None = None
    gate_up: ProductPlan | None = None
    down: ProductPlan | None = None
    attention: AttentionPlan | None = None


class LayerSizes(NamedTuple):
    """A layer as a decode step sees it: `LayerSizes(num_heads=16, num_kv_heads=8, head_dim=128, width=1024, inner=3072, itemsize=2)`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    inner: int
    itemsize: int


# Up to here products are a matter of latency, and ours start while the kernel before them ends; beyond, the library's are faster.
_MOST_ROWS = 64
_COLUMNS, _DEPTH, _GATED_DEPTH, _MOST_SPLITS = 64, 128, 64, 4
# Weights of more tiles keep the library's programs busy as well; those of a gate are counted in one half.
_MOST_TILES, _MOST_GATED_TILES = 64, 64
# With more programs than run at once, what each does before it reads its keys costs more than a kernel of its own for all.
_JOINT_PROGRAMS_PER_SM = 4
_PAGE, _LEAST_KEYS, _LONG_KEYS, _SPLIT_KEYS, _MOST_SPLIT_PROGRAMS_PER_SM, _MOST_ATTENTION_SPLITS = (
    32,
    128,
    768,
    512,
    32,
    32,
)


def plan_step(sizes: LayerSizes, num_rows: int, num_blocks: int, num_sms: int) -> StepPlan:
    """For so many rows with tables of `num_blocks` blocks, on a GPU of Hopper's kind.

    Of few rows: kernels that follow each other closely, sums of narrow products shared by several programs, and one kernel from the joint
    projection to attention. Of many rows: the library's products, and kernels that do one thing each.
    """
    pairs = num_rows * sizes.num_kv_heads
    if pairs > _JOINT_PROGRAMS_PER_SM * num_sms:
        return StepPlan()
    plan = StepPlan(
        joint=True, attention=plan_joint_attention(pairs, num_blocks, sizes.head_dim * sizes.itemsize, num_sms)
    )
    if num_rows > _MOST_ROWS or sizes.itemsize > 2:
        return plan
    queries = sizes.num_heads * sizes.head_dim
    columns = queries + 2 * sizes.num_kv_heads * sizes.head_dim
    return plan._replace(
        # Each program of attention adds up its shares, so that they should be few.
        qkv=_plan_product(num_rows, columns, sizes.width, num_sms * 3 // 4),
        out=_plan_product(num_rows, sizes.width, queries, num_sms),
        gate_up=_plan_gated(num_rows, sizes.inner, sizes.width),
        down=_plan_product(num_rows, sizes.width, sizes.inner, num_sms),
    )


def plan_joint_attention(pairs: int, num_blocks: int, row_bytes: int, num_sms: int) -> AttentionPlan:
    """For so many pairs of row and kv head; row_bytes: of a head's key.

    Splits make a program for each multiprocessor; a context beyond 768 keys is split even so, since one long row would go on alone.
    """
    reach, filling = num_blocks * BLOCK_SIZE, max(num_sms // pairs, 1)
    long = min(reach // _LONG_KEYS, -(-_MOST_SPLIT_PROGRAMS_PER_SM * num_sms // pairs))
    splits = max(min(max(filling, long), -(-reach // _LEAST_KEYS), _MOST_ATTENTION_SPLITS), 1)
    least = max(_LEAST_KEYS, _SPLIT_KEYS // filling // _LEAST_KEYS * _LEAST_KEYS)
    if row_bytes > 256:
        return AttentionPlan(splits, 32, 8, 3, least)
    layout = (32, 2, 4) if 2 * pairs >= 3 * num_sms else (64, 4, 3)
    return AttentionPlan(splits, *layout, least)


def _plan_product(num_rows: int, columns: int, depth: int, programs: int) -> ProductPlan | None:
    tiles = -(-columns // _COLUMNS)
    if tiles > _MOST_TILES or depth % _DEPTH:
        return None
    splits = max(min(programs // tiles, _MOST_SPLITS, depth // _DEPTH), 1)
    return ProductPlan(_round_rows(num_rows), _COLUMNS, _DEPTH, splits, num_warps=4, num_stages=4, turned=True)


def _plan_gated(num_rows: int, inner: int, depth: int) -> ProductPlan | None:
    if -(-inner // _COLUMNS) > _MOST_GATED_TILES or depth % _GATED_DEPTH:
        return None
    return ProductPlan(_round_rows(num_rows), _COLUMNS, _GATED_DEPTH, 1, num_warps=4, num_stages=5, turned=True)


def _round_rows(num_rows: int) -> int:
    """Rows of a tile of the tensor cores: a power of two, 16 at least."""
    return max(16, 1 << (num_rows - 1).bit_length())
