"""The router, the losses of its load, and dispatch: against loops over tokens, at the edges where a dispatcher drops or divides by 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import TINY, FakeCorpus
from jax.sharding import AxisType, PartitionSpec

from spannorm_jax import LM, Block, ModelConfig, dispatch
from spannorm_jax.config import edit
from spannorm_jax.errors import UserError
from spannorm_jax.model import count_params, flops_per_token, infos, param_roles, unstack
from spannorm_jax.moe import Moe, choose, load
from spannorm_jax.optim import make_optimizer
from spannorm_jax.step import init_state, make_step

N, K, E, D, F = 12, 3, 8, 5, 4
CFG = ModelConfig(topology='pre', layers=1, width=D, heads=1, positions='none', experts=E, experts_per_token=K, expert_ffn=F, vocab=11)
rng = np.random.default_rng(0)
NONE = np.full((N, K), E)
CHOICES = {
    'random': np.stack([rng.permutation(E)[:K] for _ in range(N)]),
    'all to one': np.tile([[2, E, E]], (N, 1)),
    'all to the same': np.tile([[7, 0, 3]], (N, 1)),
    'half of them padding': np.where(np.arange(N)[:, None] % 2, np.stack([rng.permutation(E)[:K] for _ in range(N)]), E),
    'nobody': NONE,
}
X, WEIGHT = rng.standard_normal((N, D)).astype(np.float32), rng.random((N, K)).astype(np.float32)
MATRICES = rng.standard_normal((E, D, D)).astype(np.float32)


def loop(x, expert, weight, matrices):
    out = np.zeros_like(x, np.float64)
    for n in range(len(x)):
        for e, w in zip(expert[n], weight[n], strict=True):
            if e < E:
                out[n] += w * np.tanh(x[n].astype(np.float64) @ matrices[e])
    return out


def tanh_experts(matrices, x_MD, groups):
    return jnp.tanh(dispatch.grouped_dot(x_MD, matrices, groups))


def on_one(x, expert, weight, matrices):
    return dispatch.local(functools.partial(tanh_experts, matrices), x, jnp.asarray(expert), weight, E)


def on_four(x, expert, weight, matrices, room=None, slots=None, ragged=False):
    """Devices 0..3 hold two experts each and three tokens each."""
    mesh = jax.make_mesh((4,), ('expert',), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    P = PartitionSpec('expert')

    def body(x, expert, weight, matrices):
        return dispatch.over_devices(functools.partial(tanh_experts, matrices), x, expert, weight, E // 4, 4, 'expert', room, slots, ragged)

    return jax.shard_map(body, mesh=mesh, in_specs=P, out_specs=P, check_vma=False)(x, expert, weight, matrices)


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """jax.lax.ragged_all_to_all, by its documentation, out of gathers: XLA:CPU does not have it."""
    me, rows = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    whole = lambda a: jax.lax.all_gather(a, axis_name)  # noqa: E731
    data, starts, sizes, places = map(whole, (operand, input_offsets, send_sizes, output_offsets))
    for src in range(len(input_offsets)):
        i = rows - places[src, me]
        mine = (i >= 0) & (i < recv_sizes[src]) & (recv_sizes[src] == sizes[src, me])
        output = jnp.where(mine[:, None], data[src][jnp.clip(starts[src, me] + i, 0, len(operand) - 1)], output)
    return output


def on_four_ragged(x, expert, weight, matrices):
    return on_four(x, expert, weight, matrices, ragged=True)


@pytest.mark.parametrize('tile', [None, 1])  # as the CPU does it, and as accelerators do
@pytest.mark.parametrize('where', [on_one, on_four, on_four_ragged])
@pytest.mark.parametrize('choice', CHOICES)
def test_dispatch_is_the_loop_over_tokens(where, choice, tile, monkeypatch):
    """Values and all three gradients; nothing is dropped, nothing is NaN, whoever has no tokens."""
    monkeypatch.setattr(jax.lax, 'ragged_all_to_all', emulated)
    if tile:
        monkeypatch.setattr(dispatch, 'tile_for', lambda rows, E: tile)
    expert = CHOICES[choice]
    g = rng.standard_normal((N, D)).astype(np.float32)
    out, pull = jax.vjp(jax.jit(lambda x, w, m: where(x, expert, w, m)), X, WEIGHT, MATRICES)
    np.testing.assert_allclose(out, loop(X, expert, WEIGHT, MATRICES), atol=1e-5)

    def dense(x, w, m):
        every_NED = jnp.tanh(jnp.einsum('ND,EDF->NEF', x, m))
        weight_NE = jnp.zeros((N, E + 1)).at[jnp.arange(N)[:, None], expert].add(w)[:, :E]
        return jnp.einsum('NE,NEF->NF', weight_NE, every_NED)

    _, want = jax.vjp(jax.jit(dense), X, WEIGHT, MATRICES)
    for got, ours in zip(pull(jnp.asarray(g)), want(jnp.asarray(g)), strict=True):
        np.testing.assert_allclose(got, ours, atol=1e-5)


def test_capacity_bounds_what_travels():
    """Room for one token from each device leaves behind the second and third that want the same device, and no other."""
    expert = np.full((N, K), E)
    expert[:, 0] = [0, 1, 2, 0, 0, 0, 7, 2, 4, 5, 4, 5]
    seen = np.asarray(jax.jit(functools.partial(on_four, room=1))(X, expert, WEIGHT, MATRICES))
    kept = [0, 2, 3, 6, 7, 8, 9]  # of each device's three tokens, the first one for each pair of experts
    want = loop(X, expert, WEIGHT, MATRICES)
    np.testing.assert_allclose(seen[kept], want[kept], atol=1e-5)
    assert not seen[sorted(set(range(N)) - set(kept))].any()


def test_within_capacity_counts_by_row_and_in_order():
    expert_BTK = np.array([[[0, 1], [0, 2], [0, 1]], [[0, 3], [3, 0], [4, 0]]])  # 4 is nobody
    kept = dispatch.within_capacity(jnp.asarray(expert_BTK), 4, 2)
    assert kept.tolist() == [[[1, 1], [1, 1], [0, 1]], [[1, 1], [1, 1], [0, 0]]]


def test_no_scatter_in_either_direction():
    """Every data movement of rows is a gather; scatters are slow, and on GPU in no fixed order."""
    f = lambda x, w: dispatch.local(functools.partial(tanh_experts, jnp.asarray(MATRICES)), x, jnp.asarray(CHOICES['random']), w, E).sum()  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(f))(X, WEIGHT))
    assert 'gather' in text
    assert not [line for line in text.splitlines() if 'scatter' in line and f'{D}]' in line.split('=')[0]]


def test_equal_scores_choose_the_lower_index():
    zero = jnp.zeros((1, 2, E))
    assert choose(CFG, zero, jnp.zeros(E)).expert_BTK.tolist() == [[[0, 1, 2]] * 2]
    grouped = edit(CFG, {'expert_groups': 4, 'groups_per_token': 2})
    assert choose(grouped, zero, None).expert_BTK.tolist() == [[[0, 1, 2]] * 2]


def test_the_bias_chooses_and_does_not_weigh():
    logits = jax.random.normal(jax.random.key(0), (2, 5, E))
    bias = jnp.zeros(E).at[6].set(10.0)
    choice = choose(CFG, logits, bias)
    assert (choice.expert_BTK == 6).any(-1).all()
    score = jnp.take_along_axis(jax.nn.sigmoid(logits), choice.expert_BTK, -1)
    np.testing.assert_allclose(choice.weight_BTK, score / score.sum(-1, keepdims=True), rtol=1e-6)
    assert not jax.grad(lambda b: choose(CFG, logits, b).weight_BTK[..., 0].sum())(bias).any()
    dead = choose(CFG, logits - 200, bias)  # every sigmoid is 0: the weights are 0, not 0 / 0
    assert not dead.weight_BTK.any() and jnp.isfinite(jax.grad(lambda x: choose(CFG, x, bias).weight_BTK.sum())(logits - 200)).all()


@pytest.mark.parametrize('over', ['sequence', 'batch'])
def test_balance_by_its_definition(over):
    cfg = edit(CFG, {'balance': over})
    logits = np.random.default_rng(1).standard_normal((3, 6, E)).astype(np.float32)
    real = np.arange(6) < np.array([[6], [4], [0]])
    choice = choose(cfg, jnp.asarray(logits), None)
    found = jax.jit(functools.partial(load, cfg))(choice, logits, real)
    share = np.asarray(choice.share_BTE, np.float64)
    groups = [[(0, t) for t in range(6)], [(1, t) for t in range(4)]]
    if over == 'batch':
        groups = [groups[0] + groups[1]]
    total = 0.0
    for group in groups:
        f, P = np.zeros(E), np.zeros(E)
        for b, t in group:
            f[np.asarray(choice.expert_BTK[b, t])] += E / (K * len(group))
            P += share[b, t] / len(group)
        total += len(group) * (f * P).sum()
    np.testing.assert_allclose(found['balance'], total / 10, rtol=1e-5)
    np.testing.assert_allclose(found['count'].sum(), 10 * K)
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(found['z'], (lse**2)[real].mean(), rtol=1e-5)
    np.testing.assert_allclose(found['entropy'], -(share * np.log(share)).sum(-1)[real].mean(), rtol=1e-5)


def test_an_even_router_is_in_balance():
    found = load(CFG, choose(CFG, jnp.zeros((2, 8, E)), None), jnp.zeros((2, 8, E)), jnp.ones((2, 8), bool))
    assert float(found['balance']) == pytest.approx(1) and float(found['entropy']) == pytest.approx(np.log(E))


def test_padding_reaches_no_expert_and_no_statistic():
    x = jax.random.normal(jax.random.key(1), (2, 7, D))
    real = jnp.arange(7)[None] < jnp.array([[7], [3]])
    module = Moe(edit(CFG, {'capacity_factor': 1.0}))
    params = module.init(jax.random.key(0), x)
    out, stats = jax.jit(module.apply)(params, x, real)
    other, same = jax.jit(module.apply)(params, jnp.where(real[..., None], x, 1e3), real)
    assert not np.asarray(out)[~np.asarray(real)].any() and float(stats['moe/count'].sum()) == 10 * K
    np.testing.assert_array_equal(np.asarray(out)[np.asarray(real)], np.asarray(other)[np.asarray(real)])
    assert all(np.array_equal(stats[k], same[k]) for k in stats if k.startswith('moe/'))
    nobody, stats = jax.jit(module.apply)(params, x, jnp.zeros((2, 7), bool))
    assert not np.asarray(nobody).any() and all(np.isfinite(stats[k]).all() for k in stats)


def test_dropped_share():
    module = Moe(edit(CFG, {'capacity_factor': 0.5, 'router_bias': True}))
    x = jax.random.normal(jax.random.key(1), (2, 16, D))
    params = jax.tree.map(jnp.asarray, module.init(jax.random.key(0), x))
    params['params']['router_bias'] = params['params']['router_bias'].replace_boxed(jnp.zeros(E).at[:K].set(9.0))
    _, stats = jax.jit(module.apply)(params, x)  # every token wants experts 0, 1, 2; each takes ceil(0.5 * 16 * 3 / 8) = 3 of 16
    assert float(stats['moe/dropped']) == pytest.approx(1 - 3 / 16)


def test_dense_experts_are_the_dispatched_ones_and_have_every_derivative():
    """Values, gradients, and products in forward mode, which the dispatch refuses; with dropped choices and a norm inside each expert."""
    x, v, u = jax.random.normal(jax.random.key(1), (3, 2, 7, D))
    real = jnp.arange(7)[None] < jnp.array([[7], [3]])
    modules = [Moe(edit(CFG, {'capacity_factor': 1.0, 'expert_exchange': way})) for way in ('padded', 'dense')]
    params = modules[0].init(jax.random.key(0), x, real, 'inner')
    padded, dense = (lambda p, x, m=m: m.apply(p, x, real, 'inner')[0] for m in modules)

    @jax.jit
    def both(p, x):
        found = [jax.vjp(f, p, x) for f in (padded, dense)]
        return [(y, pull(u)) for y, pull in found], jax.jvp(lambda x: dense(p, x), (x,), (v,))[1]

    ((y, back), (same, same_back)), push = both(params, x)
    np.testing.assert_allclose(same, y, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), same_back, back)
    np.testing.assert_allclose((push * u).sum(), (back[1] * v).sum(), rtol=1e-4)
    with pytest.raises(TypeError, match='forward-mode'):
        jax.jvp(lambda x: padded(params, x), (x,), (v,))


def moe_run(**changes):
    cfg = edit(
        TINY, {'model.experts': 4, 'model.experts_per_token': 2, 'model.first_dense': 1, 'model.expert_ffn': 8, 'data.batch': 8} | changes
    )
    lm, tree = LM(cfg.model), infos(cfg.model)
    opt = make_optimizer(cfg, tree)
    step, state = jax.jit(make_step(cfg, lm, opt, tree)), init_state(cfg, lm, opt)
    feed = FakeCorpus().train_batches(8, cfg.data.seq, 0)
    rows = []
    for _ in range(3):
        before = state
        state, metrics = step(state, next(feed))
        rows.append((before, state, metrics))
    return cfg, rows


def test_the_bias_follows_the_load():
    """b += rate * sign(mean load - load), from the counts of the same step; no gradient, moment or decay ever moves it."""
    cfg, rows = moe_run(**{'optim.router_bias_rate': 0.25, 'optim.router_bias_until': 0.5, 'run.steps': 4})
    for i, (before, after, metrics) in enumerate(rows):
        load_E = np.asarray(metrics['moe/load'])[1]
        old, new = (np.asarray(unstack(cfg.model, s.params)['layers.1.ffn.router_bias']) for s in (before, after))
        np.testing.assert_allclose(new - old, 0.25 * np.sign(0.25 - load_E) if i < 2 else 0, atol=1e-6)
        assert np.isnan(np.asarray(metrics['moe/load'])[0]).all() and load_E.sum() == pytest.approx(1)
        assert float(metrics['moe/max_over_mean'][1]) == pytest.approx(4 * load_E.max())
        assert float(metrics['moe/bias_norm'][1]) == pytest.approx(np.linalg.norm(new))
        assert float(metrics['moe/dropped'][1]) == 0
    assert param_roles(cfg.model)['stack']['blocks_1']['ffn']['router_bias'] == 'router_bias'


def test_accumulation_changes_no_number():
    """Micro-batches add up: losses of the load over rows, counts, and what the bias does with them."""
    (_, whole), (_, split) = moe_run(**{'optim.balance_loss': 0.1}), moe_run(**{'optim.balance_loss': 0.1, 'optim.accumulate': 4})
    for (_, a, m), (_, b, n) in zip(whole, split, strict=True):
        np.testing.assert_allclose(float(m['aux_loss']), float(n['aux_loss']), rtol=1e-5)
        np.testing.assert_array_equal(m['moe/load'], n['moe/load'])
        for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


def test_losses_of_the_router_reach_the_gradient():
    plain = moe_run(**{'optim.balance_loss': 0.0})[1][0][2]
    with_loss = moe_run(**{'optim.balance_loss': 0.5, 'optim.router_z_loss': 0.25})[1][0][2]
    assert float(plain['aux_loss']) == 0 and float(plain['loss']) == pytest.approx(float(with_loss['loss']))
    want = 0.5 * float(plain['moe/balance'][1]) + 0.25 * float(plain['moe/z'][1])
    assert float(with_loss['aux_loss']) == pytest.approx(want, rel=1e-5)
    assert float(plain['grad_norm']) != pytest.approx(float(with_loss['grad_norm']), rel=1e-3)


def test_counts_of_parameters_and_flops():
    cfg = ModelConfig(topology='pre', layers=2, width=8, heads=2, ffn=16, vocab=10, experts=4, experts_per_token=2, expert_ffn=5,
                      first_dense=1, attention='mla', kv_latent=6, nope_dim=4, rope_dim=2, v_dim=3, shared_experts=2)  # fmt: skip
    attention = 8 * 2 * 6 + 8 * (6 + 2) + 6 * 2 * (4 + 3) + 2 * 3 * 8
    dense, expert = 3 * 8 * 16, 3 * 8 * 5
    gains = 2 * (2 * 8 + 6) + 8
    assert count_params(cfg) == 2 * 80 + 2 * attention + dense + 4 * expert + 2 * expert + 8 * 4 + 4 + gains
    active = 80 + 2 * attention + dense + 2 * expert + 2 * expert + 8 * 4
    assert flops_per_token(cfg, 7) == 6 * active + 6 * 2 * 2 * (6 + 3) * 4


def test_a_block_alone_knows_its_kind():
    cfg = edit(CFG, {'layers': 3, 'first_dense': 1})
    x = jax.random.normal(jax.random.key(0), (1, 4, D))
    names = [set(Block(cfg, layer=l).init(jax.random.key(0), x)['params']['ffn']) for l in range(2)]
    assert names == [{'gate', 'up', 'down'}, {'gate', 'up', 'down', 'router', 'router_bias'}]


@pytest.mark.parametrize(
    'fields, words',
    [
        (dict(experts=4, experts_per_token=5), 'experts_per_token = 5 is more than model.experts = 4'),
        (dict(experts=6, expert_groups=4), 'expert_groups = 4 does not divide model.experts = 6'),
        (dict(experts=8, expert_groups=4, experts_per_token=3), '1 groups of 2 hold only 2 experts'),
        (dict(experts=4, expert_groups=4, groups_per_token=2), 'ranked by its two best experts'),
        (dict(experts=4, first_dense=13), 'first_dense = 13 is more than model.layers = 12'),
        (dict(experts=4, mlp_bias=True), 'experts have no biases'),
        (dict(shared_experts=1), 'shared_experts has no effect with model.experts = 0'),
        (dict(v_dim=8), "v_dim has no effect with model.attention = 'gqa'"),
        (dict(attention='mla', kv_heads=2), "kv_heads has no effect with model.attention = 'mla'"),
        (dict(attention='mla', rope_dim=3), 'even number of dimensions, got 3; set model.rope_dim'),
        (dict(topology='normformer', heads=3, head_dim=8), 'model.heads = 3 must divide model.width = 128'),
    ],
)
def test_what_cannot_be_is_explained(fields, words):
    with pytest.raises(UserError, match=words):
        ModelConfig(**fields)
