"""Every number of every golden: outputs of third-party code, against this model. `--golden-dir DIR` runs another set of the same names."""

import json
import pathlib
import shutil

import golden_maps as maps
import golden_variants as variants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_reference import random_params

from spannorm_jax import LM
from spannorm_jax.model import restack, unstack

HERE = pathlib.Path(__file__).parent / 'golden'
# (atol, rtol) of tests/golden/README.md by kind of key; grad_l2 has a floor because gradients of k_proj.bias are rounding noise.
TOLERANCE = {'loss': (2e-5, 0.0), 'grad_l2': (1e-5, 1e-3), 'grad': (2e-5, 1e-3)}
ACTIVATION = (5e-5, 1e-4)
# The variants of the default run: the one with most multipliers, and the units. `--full` runs a variant of every golden.
QUICK = ('hf_hyperclovax_periln', *maps.UNITS)


def goldens(folder: pathlib.Path) -> list[pathlib.Path]:
    """The goldens of a folder; a name nobody knows stays in, so that its test fails."""
    found = sorted(path.parent for path in folder.glob('*/config.json'))
    if not found:
        raise pytest.UsageError(f'no goldens (NAME/config.json) in {folder}')
    return found


def pytest_generate_tests(metafunc):
    if 'golden' in metafunc.fixturenames:
        given = metafunc.config.getoption('--golden-dir')
        found = goldens(pathlib.Path(given) if given else HERE)
        metafunc.parametrize('golden', found, ids=[path.name for path in found])


def load(path):
    read = lambda name: dict(np.load(path / name))  # noqa: E731
    return json.loads((path / 'config.json').read_text()), load_file(path / 'model.safetensors'), read('inputs.npz'), read('outputs.npz')


def gradients(grads):
    """grad/NAME and grad_l2/NAME of gradients by golden name."""
    return {f'grad/{k}': g for k, g in grads.items()} | {f'grad_l2/{k}': np.linalg.norm(g) for k, g in grads.items()}


def run_model(golden, config, weights, inputs):
    """What the model says about every key that a golden of a whole model may hold."""
    cfg, where, facts = maps.read(golden, config, weights)
    named = maps.canonical(cfg, where, weights)
    # Each weight is used whole and once: every one is read, and sizes agree (a fused matrix has no row left over).
    assert {w for place in where.values() for w in place.weights} == set(weights), 'weights that no canonical parameter reads'
    assert sum(w.size for w in weights.values()) == sum(w.size for w in named.values())
    lm, params, tokens = LM(cfg), restack(cfg, named), inputs['tokens']

    def loss(params):
        features, extras = lm.features(params, tokens, stats='tensors')
        logits = lm.logits(params, features)
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean(), (features, logits, extras['hidden'], extras['after'])

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, (features, logits, hidden, after)), grads = jax.device_get(step(params))
    embedded = named['embed'][tokens] * (cfg.embed_scale if maps.hidden0_scaled(golden, facts) else 1.0)
    hidden = hidden if isinstance(hidden, tuple) else (hidden,)
    sites = [jax.tree.map(lambda x, i=i: x[i], run) for run in after for i in range(len(jax.tree.leaves(run)[0]))]
    out = {'logits': logits, 'loss': value, 'hidden/0': embedded, 'hidden/final_norm': features, 'hidden/features': features}
    out['sublayer_hidden/0'] = embedded
    for l, site in enumerate(sites, 1):
        before = hidden[0][l - 2] if l > 1 else embedded
        # Where the sum after attention has no norm (first block of KEEL) the stream in the middle is the sum itself.
        middle = site.get('attn_sum', before + site['attn'])
        out |= {f'hidden/{l}': hidden[0][l - 1], f'mid/{l}': middle}
        out |= {f'{name}/{l}': hidden[-1][l - 1] for name in ('hidden_y', 'hidden_residual') if len(hidden) > 1}
        if 'router_logits' in site:
            out[f'router/{l - 1}/logits'] = site['router_logits']
            out[f'router/{l - 1}/topk_idx_sorted'] = np.sort(site['router_experts'], axis=-1)
        out |= {f'sublayer_hidden/{2 * l - 1}': middle, f'sublayer_hidden/{2 * l}': hidden[0][l - 1]}
    return out | gradients(maps.back(cfg, where, weights, unstack(cfg, grads))), facts


def run_unit(unit, config, weights, inputs):
    facts = maps.Facts(config, {})

    def loss(both):
        out = unit(facts, both['weights'], both['inputs'])
        return out['loss_mean_sq'], out

    step = jax.jit(jax.grad(loss, has_aux=True))
    grads, out = jax.device_get(step({'weights': weights, 'inputs': inputs}))
    return out | gradients(grads['weights'] | grads['inputs']), facts


def check(path):
    """Compare one golden folder, key by key; returns the facts of its config.json."""
    config, weights, inputs, outputs = load(path)
    name = path.name if path.name in maps.MAPS | maps.UNITS else config.get('name', path.name)
    if name not in maps.MAPS | maps.UNITS:
        pytest.fail(f'{path}: unknown golden {name!r}; known: {", ".join(sorted(maps.MAPS | maps.UNITS))} (tests/golden_maps.py)')
    with jax.default_matmul_precision('highest'):
        if name in maps.UNITS:
            got, facts = run_unit(maps.UNITS[name], config, weights, inputs)
        else:
            got, facts = run_model(maps.MAPS[name], config, weights, inputs)
            still = {w for w in weights if w.endswith('e_score_correction_bias')}  # it only takes part in a choice
            assert not any(got[f'grad_l2/{w}'] for w in still)
            promised = {'logits', 'loss', *(f'grad_l2/{w}' for w in set(weights) - still)}
            assert promised <= set(outputs), f'{path}: outputs.npz lacks {sorted(promised - set(outputs))[:3]}'
    assert set(outputs) <= set(got), f'{path}: nothing to compare with {sorted(set(outputs) - set(got))}'
    wrong = []
    for key, want in outputs.items():
        atol, rtol = TOLERANCE.get(key.split('/')[0], ACTIVATION)
        if key.endswith('topk_idx_sorted'):
            atol = rtol = 1e-9  # the same experts, or not
        assert got[key].shape == want.shape, f'{key}: shape {got[key].shape}, expected {want.shape}'
        excess = (np.abs(got[key] - want) / (atol + rtol * np.abs(want))).max()
        if not excess <= 1:
            wrong.append(f'{key}: error is {excess:.3g} times the tolerance')
    unread = f'\nnot read from config.json: {facts.unread()}' if facts.unread() else ''
    assert not wrong, f'{path}: {len(wrong)} of {len(outputs)} keys differ{unread}\n' + '\n'.join(wrong[:20])
    return facts


def test_golden(golden):
    facts = check(golden)
    if golden.parent == HERE:
        assert not facts.unread()


@pytest.mark.parametrize('name', [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in maps.MAPS | maps.UNITS])
def test_variant(name, tmp_path):
    """The same check on a golden of our own: every map, at other shapes and options."""
    variants.write(tmp_path, name, lambda cfg: unstack(cfg, random_params(cfg)))
    assert not check(tmp_path / name).unread()


def test_a_wrong_fact_is_caught(tmp_path):
    """One fact of config.json changed: the numbers no longer agree, and the message says what was not read."""
    shutil.copytree(HERE / 'hf_mhc_unit', tmp_path / 'hf_mhc_unit')
    edit_config(tmp_path / 'hf_mhc_unit', rms_eps=1e-3, unheard_of=1)
    with pytest.raises(AssertionError, match=r"keys differ\s+not read from config.json: \['unheard_of'\]"):
        check(tmp_path / 'hf_mhc_unit')


def test_every_golden_has_a_map():
    assert {path.name for path in HERE.iterdir() if path.is_dir()} == set(maps.MAPS) | set(maps.UNITS)


def test_unknown_names_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(pytest.UsageError, match='no goldens'):
        goldens(tmp_path)
    shutil.copytree(HERE / 'hf_llama', tmp_path / 'hf_lama')
    edit_config(tmp_path / 'hf_lama', name='hf_lama')
    assert [path.name for path in goldens(tmp_path)] == ['hf_lama']
    with pytest.raises(pytest.fail.Exception, match="unknown golden 'hf_lama'"):
        check(tmp_path / 'hf_lama')


def edit_config(path, **changes):
    config = json.loads((path / 'config.json').read_text())
    (path / 'config.json').write_text(json.dumps(config | changes))
