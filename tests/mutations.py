"""Would the tests notice? Change one thing in a copy of the package and run the tests that should fail: `python tests/mutations.py [WORD]`.

Prints caught or survived for each mutation (only those whose description contains WORD, if given); exit 1 when any survives.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
# When the tests named by a mutation pass, these run before it counts as a survivor.
ALL = ('reference', 'topology', 'initializers', 'model', 'golden')


class Mutation(NamedTuple):
    what: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    tests: tuple[str, ...]


def topology(name):
    return (f'tests/test_reference.py::test_topology[{name}]',)


def mixture(name):
    return (f'tests/test_reference.py::test_topology_with_mla_and_moe[{name}]',)


def options(name):
    return (f'tests/test_reference.py::test_options[{name}]',)


def init(name):
    return (f'tests/test_initializers.py::{name}',)


COMMON, OWN = init('test_common_recipe_is_the_same_for_every_topology'), init('test_own_recipe_is_the_published_one')
MEASURED = init('test_measured_std_of_every_tensor_and_what_it_depends_on')

MUTATIONS = [
    Mutation(
        'span: second skip from the middle of the block',
        'topology.py',
        "y = norm('attn_sum', attn(c.embedded(x)) + x)\n    return norm('ffn_sum', ffn(y) + x)",
        "y = norm('attn_sum', attn(c.embedded(x)) + x)\n    return norm('ffn_sum', ffn(y) + y)",
        topology('span-3'),
    ),
    Mutation(
        'span: reading A skips the normed embedding',
        'topology.py',
        "y = norm('attn_sum', attn(c.embedded(x)) + x)\n    return norm(",
        "x = c.embedded(x)\n    y = norm('attn_sum', attn(x) + x)\n    return norm(",
        topology('span-3'),
    ),
    Mutation(
        'b2t: the block input is not added',
        'topology.py',
        "norm('ffn_sum', x + y + ffn(y))",
        "norm('ffn_sum', y + ffn(y))",
        topology('b2t-3'),
    ),
    Mutation(
        'hybrid: the FFN skip starts before the norm',
        'topology.py',
        "z = norm('ffn_in', x + attn(x, norms='qkv'))\n    return z + ffn(z)",
        "z = x + attn(x, norms='qkv')\n    return z + ffn(norm('ffn_in', z))",
        topology('hybrid-3'),
    ),
    Mutation(
        'peri: no norm on the output of attention',
        'topology.py',
        "c.add('attn', x, norm('attn_branch', attn(norm('attn_in', x))))",
        "c.add('attn', x, attn(norm('attn_in', x)))",
        topology('peri-3'),
    ),
    Mutation(
        'lns: index shifted by one',
        'topology.py',
        "coef=lambda cfg, l: {'s': (l + 1) ** -0.5},\n",
        "coef=lambda cfg, l: {'s': (l + 2) ** -0.5},\n",
        topology('lns-3'),
    ),
    Mutation(
        'lns: scale before the gain of one norm only',
        'topology.py',
        "x + ffn(c.s * norm('ffn_in', x))",
        "x + ffn(norm('ffn_in', c.s * x))",
        topology('lns-3'),
    ),
    Mutation(
        'mixln: one PostNorm block too few',
        'topology.py',
        'return int(cfg.post_fraction * cfg.layers + 0.5)',
        'return int(max(cfg.post_fraction * cfg.layers - 0.5, 0))',
        topology('mixln-3'),
    ),
    Mutation(
        'deepnorm: alpha of an encoder-decoder',
        'topology.py',
        '(2 * cfg.layers) ** 0.25 if cfg.alpha',
        '(3 * cfg.layers) ** 0.25 if cfg.alpha',
        topology('deepnorm-3'),
    ),
    Mutation('keel: alpha is L', 'topology.py', '2.0 * cfg.layers if cfg.alpha', '1.0 * cfg.layers if cfg.alpha', topology('keel-3')),
    Mutation(
        'keel: alpha in the first FFN',
        'topology.py',
        "norm('ffn_sum', x + ffn(norm('ffn_in', x)))",
        "norm('ffn_sum', c.alpha * x + ffn(norm('ffn_in', x)))",
        topology('keel-3'),
    ),
    Mutation(
        'residual: s ignored after attention',
        'topology.py',
        "norm('attn_sum', x + o), r + s * o",
        "norm('attn_sum', x + o), r + o",
        options('residual-scales'),
    ),
    Mutation(
        'siamese: s on the Y stream too',
        'topology.py',
        "return norm('ffn_sum', c.add('ffn', X, c.s * o)), Y + o",
        "return norm('ffn_sum', c.add('ffn', X, c.s * o)), Y + c.s * o",
        topology('siamese-3'),
    ),
    Mutation(
        'siamese_olmo: no 2 in s', 'topology.py', "{'s': (2 * (l + 1)) ** -0.5}", "{'s': (l + 1) ** -0.5}", topology('siamese_olmo-3')
    ),
    Mutation(
        'normformer: head gains dropped',
        'topology.py',
        ' * gain_N[:, None]).reshape(o.shape)',
        ' + 0 * gain_N[:, None]).reshape(o.shape)',
        topology('normformer-3'),
    ),
    Mutation(
        'post: a final norm by default',
        'topology.py',
        "'arXiv:1706.03762', ('postnorm', 'post_norm', 'postln'), final_norm=False)",
        "'arXiv:1706.03762', ('postnorm', 'post_norm', 'postln'))",
        topology('post-3'),
    ),
    Mutation(
        'hc: streams mixed by the transpose',
        'streams.py',
        "'...sd,...st->...td', H, alpha",
        "'...td,...st->...sd', H, alpha",
        topology('hc-3'),
    ),
    Mutation('mhc: post without its factor 2', 'streams.py', '2 * jax.nn.sigmoid(post)', 'jax.nn.sigmoid(post)', topology('mhc-3')),
    Mutation('mhc: mixing matrix transposed', 'streams.py', "'...ts,...sd->...td', R, H", "'...st,...sd->...td', R, H", topology('mhc-3')),
    Mutation(
        'init: std of every matrix halved',
        'initializers.py',
        'Init(base * r.gains.get(name, 1.0)',
        'Init(base / 2 * r.gains.get(name, 1.0)',
        COMMON,
    ),
    Mutation(
        'init: sqrt_2L forgets the 2', 'initializers.py', "'sqrt_2L': (2 * cfg.layers) ** -0.5", "'sqrt_2L': cfg.layers**-0.5", COMMON
    ),
    Mutation(
        'init: depth scale on the wrong matrix',
        'initializers.py',
        "gains={'o': scale, 'down': scale}",
        "gains={'o': scale, 'up': scale}",
        COMMON,
    ),
    Mutation(
        'init: truncation narrows the normal',
        'initializers.py',
        'self.std / _CUT_STD *',
        'self.std *',
        init('test_truncated_normal_has_the_intended_std_and_is_cut_at_three'),
    ),
    Mutation(
        'init: every layer starts alike', 'initializers.py', 'names, jnp.arange(depth))', 'names, jnp.zeros(depth, jnp.int32))', MEASURED
    ),
    Mutation(
        'init: drawn by place in the tree, not by name',
        'initializers.py',
        '[zlib.crc32(name.encode()) for name, _, _ in params]',
        'list(range(len(params)))',
        MEASURED,
    ),
    Mutation(
        'init: DeepNorm enlarges', 'topology.py', '(8 * cfg.layers) ** -0.25 if cfg.beta', '(8 * cfg.layers) ** 0.25 if cfg.beta', OWN
    ),
    Mutation(
        'norm: eps of 1e-3 whatever the config says',
        'layers.py',
        'cfg.norm_eps if eps is None',
        '1e-3 if eps is None',
        topology('pre-3'),
    ),
    Mutation(
        'norm: eps of the final norm ignored',
        'model.py',
        "cfg.final_norm_eps if site == 'final' else None",
        'None',
        options('span-no-embed-norm-final'),
    ),
    Mutation(
        'norm: gain w instead of 1 + w',
        'layers.py',
        'weights[0] + 1 if cfg.norm_unit_offset else weights[0]',
        'weights[0]',
        options('gemma'),
    ),
    Mutation(
        'norm: gain dropped',
        'layers.py',
        'x *= weights[0] + 1 if cfg.norm_unit_offset else weights[0]',
        'x *= 1 + 0 * weights[0]',
        topology('pre-3'),
    ),
    Mutation(
        'norm: LayerNorm keeps the mean',
        'layers.py',
        'x -= mean(x)',
        'x -= 0 * mean(x)',
        options('deepnorm-alpha'),
    ),
    Mutation(
        'rope: layouts exchanged', 'layers.py', "cfg.positions == 'rope_interleaved')", "cfg.positions == 'rope_half')", topology('pre-3')
    ),
    Mutation(
        'rope: positions of packed documents ignored',
        'layers.py',
        'positions_BT[..., None].astype(jnp.float32) * freq_h',
        'jnp.arange(positions_BT.shape[1], dtype=jnp.float32)[None, :, None] * freq_h',
        topology('pre-3'),
    ),
    Mutation(
        'mla: RoPE turns the first dimensions',
        'layers.py',
        'still, x = jnp.split(x_BTNH, [x_BTNH.shape[-1] - 2 * cos_BTh.shape[-1]], axis=-1)',
        'x, still = jnp.split(x_BTNH, [2 * cos_BTh.shape[-1]], axis=-1)',
        mixture('span'),
    ),
    Mutation('mla: inner norms with the eps of the others', 'mla.py', 'Norm(cfg, cfg.latent_norm_eps,', 'Norm(cfg, None,', mixture('span')),
    Mutation(
        'router: the bias weighs too',
        'moe.py',
        'weight = jnp.take_along_axis(score, expert, axis=-1)',
        'weight = jnp.take_along_axis(ranked, expert, axis=-1)',
        mixture('span'),
    ),
    Mutation(
        'router: a group counts by its best expert alone',
        'moe.py',
        'jax.lax.top_k(inside, 2)[0].sum(-1)',
        'inside.max(-1)',
        mixture('span'),
    ),
    Mutation('router: no scale', 'moe.py', 'weight * cfg.router_scale', 'weight', mixture('span')),
    Mutation(
        'router: padding is routed',
        'moe.py',
        'jnp.where(real_BT[..., None], choice.expert_BTK, E)',
        'choice.expert_BTK',
        ('tests/test_moe.py::test_padding_reaches_no_expert_and_no_statistic',),
    ),
    Mutation(
        'balance: padding counts',
        'moe.py',
        '& real_BT[..., None, None]',
        '& (real_BT[..., None, None] | True)',
        ('tests/test_moe.py::test_balance_by_its_definition',),
    ),
    Mutation(
        'bias: moved the wrong way',
        'step.py',
        'jnp.sign(count_LE.mean(-1, keepdims=True) - count_LE)',
        'jnp.sign(count_LE - count_LE.mean(-1, keepdims=True))',
        ('tests/test_moe.py::test_the_bias_follows_the_load',),
    ),
    Mutation(
        'capacity: counted over all rows',
        'dispatch.py',
        'return jax.vmap(row)(expert_BTK) & (expert_BTK < E)',
        'return row(expert_BTK.reshape(-1, expert_BTK.shape[-1])).reshape(expert_BTK.shape) & (expert_BTK < E)',
        ('tests/test_moe.py::test_within_capacity_counts_by_row_and_in_order',),
    ),
    Mutation(
        'dispatch: a device forgets whose experts they are',
        'dispatch.py',
        '- E * jnp.arange(P)[:, None, None]',
        '% E',
        ('tests/test_moe.py::test_dispatch_is_the_loop_over_tokens',),
    ),
    Mutation('dispatch: weights not applied', 'dispatch.py', '* weight_NK.reshape(-1)[choice_M][:, None]', '* 1.0', mixture('span')),
    Mutation(
        'embedding: columns of the wrong device',
        'embedding.py',
        'jnp.moveaxis(x_Gbtd, 0, 2)',
        'jnp.moveaxis(x_Gbtd[::-1], 0, 2)',
        ('tests/test_meshes.py::test_a_mesh_changes_no_number[span-2x4 data fsdp]',),
    ),
    Mutation(
        'attention: documents see each other',
        'attention.py',
        'mask_BTS & (segments_BT[:, :, None] == segments_BT[:, None, :])',
        'mask_BTS',
        topology('pre-3'),
    ),
    Mutation(
        'attention: query heads grouped the other way',
        'attention.py',
        'q_BTNH.reshape(B, T, K, N // K, H)',
        'q_BTNH.reshape(B, T, N // K, K, H).swapaxes(2, 3)',
        topology('pre-3'),
    ),
    Mutation(
        'attention: values not normed',
        'layers.py',
        "'head' if norms == 'qkv' or cfg.v_norm else 'none'",
        "'head' if cfg.v_norm else 'none'",
        topology('hybrid-3'),
    ),
    Mutation(
        'attention: score scale ignored',
        'parametrization.py',
        'if cfg.attn_scale is not None:\n        return',
        'if False:\n        return',
        options('gemma'),
    ),
    Mutation(
        'ffn: gate and up exchanged',
        'layers.py',
        "act(project('gate')) * project('up')",
        "act(project('up')) * project('gate')",
        topology('pre-3'),
    ),
    Mutation('model: logit scale ignored', 'model.py', 'logits *= parametrization.logit_scale(cfg)', 'logits *= 1.0', options('olmo2')),
    Mutation(
        'model: constant branch factor ignored',
        'model.py',
        "sums[site] = skip, o * (cfg.branch_scale * parametrization.branch_scale(cfg, 'add'))",
        'sums[site] = skip, o',
        options('pre-scalar-gains'),
    ),
    Mutation(
        'manifest: checksums are not compared',
        'manifest.py',
        'if entry != said[name]]',
        'if entry[0] != said[name][0]]',
        ('tests/test_manifest.py::test_a_flip_of_any_bit_is_found',),
    ),
    Mutation(
        'manifest: its own table is believed',
        'manifest.py',
        " or tree.get('sha256') != _of_table(files)",
        '',
        ('tests/test_manifest.py::test_a_flip_of_any_bit_is_found',),
    ),
    Mutation(
        'manifest: files it does not name pass',
        'manifest.py',
        'for name in sorted(found.keys() - said.keys())',
        'for name in ()',
        ('tests/test_manifest.py::test_damage_is_named',),
    ),
    Mutation(
        'manifest: a step without one counts',
        'manifest.py',
        'if sealed(path) or not _unfinished(path))',
        'if True)',
        ('tests/test_manifest.py::test_what_counts_as_a_checkpoint',),
    ),
    Mutation(
        'checkpoint: old ones go before the new one is sealed',
        'checkpoint.py',
        'manifest.seal(self.folder / str(step))\n',
        'for old in self.steps():\n            manifest.remove(self.folder / str(old))\n        manifest.seal(self.folder / str(step))\n',
        ('tests/test_restart.py::test_nothing_old_is_removed_before_the_new_one_is_sealed',),
    ),
    Mutation(
        'train: a removal that a kill prevented is never made up for',
        'train.py',
        '    run.checkpoints.retire()\n',
        '',
        ('tests/test_restart.py::test_a_removal_that_was_never_begun_is_made_up_for',),
    ),
    Mutation(
        'model: statistics of several streams are those of the first',
        'model.py',
        'return x.mean(-2) if x.ndim > 3 else x',
        'return x[..., 0, :] if x.ndim > 3 else x',
        ('tests/test_model.py::test_statistics_of_several_streams',),
    ),
    Mutation(
        'resume: changes that need a flag pass',
        'resume.py',
        'if c.rule.kind == FLAG and c.field not in accepted]',
        'if False]',
        ('tests/test_restart.py::test_changes_are_refused_accepted_or_forbidden_in_three_columns',),
    ),
]


def pytest(tree: pathlib.Path, tests: list[str]) -> tuple[int, str]:
    """Exit code (0 passed, 1 failed, else no verdict) and the last line; the package under test is the one in `tree`."""
    command = [sys.executable, '-m', 'pytest', '-x', '-q', '--no-header', '-p', 'no:randomly', *tests]
    done = subprocess.run(command, cwd=tree, env=os.environ | {'PYTHONPATH': str(tree)}, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).strip().rsplit('\n', 1)[-1]


def verdict(tree: pathlib.Path, mutation: Mutation) -> str:
    path = tree / 'spannorm_jax' / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return f'broken: its text occurs {text.count(mutation.old)} times in {mutation.file}'
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        code, line = pytest(tree, list(mutation.tests))
        if code == 0:
            code, line = pytest(tree, [f'tests/test_{n}.py' for n in ALL if (tree / f'tests/test_{n}.py').exists()])
            return {0: 'survived', 1: 'caught, but not by the tests that should'}.get(code, f'broken: {line}')
        return 'caught' if code == 1 else f'broken: {line}'
    finally:
        path.write_text(text)


def main(word: str = '') -> int:
    chosen = [m for m in MUTATIONS if word in m.what]
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name in ('spannorm_jax', 'tests', 'configs', 'experiments'):
            if (ROOT / name).exists():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns('__pycache__'))
        shutil.copy(ROOT / 'pyproject.toml', tree)
        where = subprocess.run(
            [sys.executable, '-c', 'import spannorm_jax; print(spannorm_jax.__file__)'],
            cwd=tree, env=os.environ | {'PYTHONPATH': str(tree)}, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        assert pathlib.Path(where).is_relative_to(tree), f'the tests would import {where}, not the copy'
        code, line = pytest(tree, sorted({test for m in chosen for test in m.tests}))
        if code:
            print(f'the tests fail before anything is changed: {line}')
            return 1
        counts = {'caught': 0}
        for mutation in chosen:
            result = verdict(tree, mutation)
            counts[result.split(':')[0]] = counts.get(result.split(':')[0], 0) + 1
            print(f'{result:10s} {mutation.what}', flush=True)
    print(', '.join(f'{n} {what}' for what, n in counts.items()))
    return int(counts['caught'] != len(chosen))


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:2]))
