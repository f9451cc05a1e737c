from itertools import product

from hybridflow.rollout.native.plans import LayerSizes, StepPlan, plan_joint_attention, plan_step

NUM_SMS = 132
SMALL = LayerSizes(num_heads=16, num_kv_heads=8, head_dim=128, width=1024, inner=3072, itemsize=2)
MIDDLE = LayerSizes(num_heads=12, num_kv_heads=2, head_dim=128, width=1536, inner=8960, itemsize=2)
LARGE = LayerSizes(num_heads=28, num_kv_heads=4, head_dim=128, width=3584, inner=18944, itemsize=2)


def list_products(sizes: LayerSizes) -> dict[str, tuple[int, int]]:
    queries = sizes.num_heads * sizes.head_dim
    return {
        "qkv": (queries + 2 * sizes.num_kv_heads * sizes.head_dim, sizes.width),
        "out": (sizes.width, queries),
        "gate_up": (sizes.inner, sizes.width),
        "down": (sizes.width, sizes.inner),
    }


def test_few_rows_get_narrow_products_and_one_kernel_around_attention() -> None:
    plan = plan_step(SMALL, 32, 32, NUM_SMS)
    assert plan.joint and plan.qkv and plan.out and plan.gate_up and plan.down and plan.attention
    # Each sum's shares meet in the next kernel: attention's programs would each add them up, so the wide projection has one.
    assert [plan.qkv.splits, plan.out.splits, plan.gate_up.splits, plan.down.splits] == [1, 4, 1, 4]
    assert plan_step(MIDDLE, 32, 32, NUM_SMS).gate_up is None
    assert plan_step(LARGE, 32, 32, NUM_SMS).qkv is None and plan_step(LARGE, 32, 32, NUM_SMS).down is not None


def test_many_rows_are_left_to_the_library_and_to_kernels_that_do_one_thing() -> None:
    assert plan_step(SMALL, 256, 32, NUM_SMS) == plan_step(LARGE, 1024, 32, NUM_SMS) == StepPlan()
    middle = plan_step(MIDDLE, 256, 32, NUM_SMS)
    assert middle.joint and middle.down is None


def test_every_product_of_a_plan_fits_its_weights() -> None:
    """Of all sizes, odd ones among them: steps divide the sum, tiles hold the rows, and a float32 model has none."""
    odd = [
        SMALL._replace(width=1000),
        MIDDLE._replace(inner=8000),
        SMALL._replace(num_heads=9, num_kv_heads=3, head_dim=80),
    ]
    for sizes, rows in product([SMALL, MIDDLE, LARGE, *odd], range(1, 140)):
        plan = plan_step(sizes, rows, 40, NUM_SMS)
        for name, (_, depth) in list_products(sizes).items():
            each = getattr(plan, name)
            if each is not None:
                assert depth % each.depth == 0 and rows <= each.rows <= max(16, 2 * rows - 1) and rows <= 64
                assert each.splits == 1 or name != "gate_up"
        wide = plan_step(sizes._replace(itemsize=4), rows, 40, NUM_SMS)
        assert wide == StepPlan(joint=wide.joint, attention=wide.attention)


def test_attention_splits_until_there_is_a_program_for_each_multiprocessor() -> None:
    def splits(pairs: int, blocks: int) -> int:
        return plan_joint_attention(pairs, blocks, 256, NUM_SMS).num_splits

    assert [splits(pairs, 32) for pairs in (1, 16, 64, 132, 512)] == [8, 8, 2, 1, 1]
    # One long row among short ones must not go on alone.
    assert splits(256, 1024) == 17 and splits(1, 1024) == 32
    for pairs, blocks, row_bytes in product(range(1, 600, 7), (1, 20, 64, 1024), (128, 256, 512)):
        plan = plan_joint_attention(pairs, blocks, row_bytes, NUM_SMS)
        assert plan.least_keys % plan.tile == 0 and plan.tile % 32 == 0 and 1 <= plan.num_splits <= 32
