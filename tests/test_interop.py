"""Hugging Face folders: other projects' numbers, byte-identical round trips, what is refused, torch (where it is installed), commands."""

import json
import resource
import struct
import sys
import time

import golden_maps as maps
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_cache import EXPERTS, LATENT
from test_golden import ACTIVATION, HERE
from test_golden import load as load_golden
from test_topology import READINGS, random_params, tiny

from spannorm_jax import LM, cli, topology
from spannorm_jax.config import MeshConfig, edit
from spannorm_jax.data import load_tokenizer
from spannorm_jax.errors import BadData, MissingInput, UserError
from spannorm_jax.interop import load_hf, save_hf
from spannorm_jax.interop.families import differences
from spannorm_jax.interop.safetensors import INDEX, WHOLE, entries, folder_entries
from spannorm_jax.model import unstack

NORMED = dict(heads=4, kv_heads=2, rope_theta=77.0, norm_eps=3e-3)
MOE = LATENT | EXPERTS | dict(positions='rope_interleaved', router_scale=1.7, norm_eps=1e-3)
# A model that each family can express, with options that its default is not.
EXAMPLES = {
    'llama': dict(topology='pre', attn_bias=True, mlp_bias=True, head_dim=6, tie_embeddings=True, activation='geglu', **NORMED),
    'gemma2': dict(
        topology='sandwich', norm_unit_offset=True, embed_scale=4.0, attn_scale=0.25, activation='geglu_tanh', tie_embeddings=True,
        **NORMED),
    'olmo2': dict(topology='reordered', qk_norm='whole', **NORMED),
    'hyperclovax': dict(topology='peri', embed_norm=False, branch_scale=0.6, logit_scale=0.4, embed_scale=3.0, attn_scale=0.7, **NORMED),
    'deepseek_v2': dict(topology='pre', router='softmax', expert_groups=2, **MOE | dict(experts=6)),
    'deepseek_v3': dict(topology='pre', expert_groups=2, groups_per_token=2, **MOE | dict(q_latent=None)),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 12)).astype(np.int32)


def example(kind, **fields):
    return tiny(**{'name': EXAMPLES[kind]['topology']} | {k: v for k, v in EXAMPLES[kind].items() if k != 'topology'} | fields)


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def logits(cfg, params, tokens=TOKENS):
    return np.asarray(jax.jit(LM(cfg).apply)(params, tokens))


# ------------------------------------------------------------ numbers of others


def hf_config(name, c):
    """config.json as transformers writes it, from a golden's facts."""
    common = {
        'vocab_size': c['vocab_size'], 'hidden_size': c['d_model'], 'intermediate_size': c['d_ff'], 'num_hidden_layers': c['n_layers'],
        'num_attention_heads': c['n_heads'], 'rms_norm_eps': c['norm_eps'], 'tie_word_embeddings': c['tie_embeddings'],
        'rope_parameters': {'rope_type': 'default', 'rope_theta': c['rope_theta']}, 'transformers_version': '5.24.0', 'bos_token_id': 1,
    }  # fmt: skip
    if 'n_kv_heads' in c:
        common |= {'num_key_value_heads': c['n_kv_heads'], 'head_dim': c['head_dim']}
    if name == 'hf_gemma2':
        caps = dict.fromkeys(('sliding_window', 'attn_logit_softcapping', 'final_logit_softcapping'))
        return common | caps | {'model_type': 'gemma2', 'query_pre_attn_scalar': round(c['attn_scale'] ** -2)}
    if name == 'hf_hyperclovax_periln':
        own = {'logits_scaling': c['logits_multiplier'], 'attention_multiplier': c['attn_scale'], 'use_post_norm': True}
        return common | own | {'model_type': 'hyperclovax'} | {k: c[k] for k in ('embedding_multiplier', 'residual_multiplier')}
    if 'deepseek' in name:
        same = (
            'kv_lora_rank', 'n_group', 'n_routed_experts', 'n_shared_experts', 'norm_topk_prob', 'q_lora_rank', 'qk_nope_head_dim',
            'qk_rope_head_dim', 'routed_scaling_factor', 'topk_group', 'v_head_dim',
        )  # fmt: skip
        other = {'moe_intermediate_size': 'moe_d_ff', 'num_experts_per_tok': 'top_k', 'first_k_dense_replace': 'first_k_dense'}
        return common | {'model_type': 'deepseek_v3'} | {k: c[k] for k in same} | {k: c[v] for k, v in other.items()}
    return common | {'model_type': name.removeprefix('hf_')}


@pytest.mark.parametrize('name', [n for n in maps.MAPS if n.startswith('hf_')])
def test_logits_of_transformers(name, tmp_path):
    """Weights and logits that transformers made (tests/golden): the folder loads, and the numbers agree."""
    config, weights, inputs, outputs = load_golden(HERE / name)
    (tmp_path / 'config.json').write_text(json.dumps(hf_config(name, config)))
    save_file(weights, tmp_path / WHOLE)
    cfg, params = load_hf(tmp_path)
    with jax.default_matmul_precision('highest'):
        np.testing.assert_allclose(logits(cfg, params, inputs['tokens']), outputs['logits'], *reversed(ACTIVATION))


# ---------------------------------------------------------------- round trips

ROUND = [*READINGS, ('span', LATENT | EXPERTS), ('hybrid', LATENT), ('subln', EXPERTS | dict(norm='layernorm', norm_bias=True))]


@pytest.mark.parametrize(('name', 'fields'), ROUND)
def test_every_topology_round_trips(name, fields, tmp_path):
    """export -> import gives the configuration and every number back; exported again, every file is the same."""
    cfg = tiny(name, **fields)
    params = random_params(cfg)
    kind = save_hf(cfg, params, tmp_path / 'a', tokenizer=load_tokenizer('bytes') if cfg.vocab > 256 else None)
    assert kind == ('llama' if (name, fields) == ('pre', {}) else 'spannorm_jax')
    back, again = load_hf(tmp_path / 'a')
    assert not differences(cfg, 'llama') if kind == 'llama' else back == cfg
    jax.tree.map(np.testing.assert_array_equal, again, params)
    save_hf(back, again, tmp_path / 'b')
    assert files(tmp_path / 'a') == files(tmp_path / 'b') and not (tmp_path / 'a.part').exists()


def test_names_of_our_own_type(tmp_path):
    """Matrices as Llama's, norms by their site; one norm per block and site, the embedding's and the final one beside them."""
    for name, block, outer in (('span', ('attn_sum', 'ffn_sum'), ['embed']), ('peri', ('attn_in', 'ffn_branch'), ['embed', 'final'])):
        cfg = tiny(name)
        params = random_params(cfg)
        save_hf(cfg, params, tmp_path / name)
        held, named = load_file(tmp_path / name / WHOLE), unstack(cfg, params)
        assert sorted(k.split('.')[2] for k in held if k.startswith('model.norms.')) == outer
        for l in range(3):
            q = held[f'model.layers.{l}.self_attn.q_proj.weight']
            np.testing.assert_array_equal(q, named[f'layers.{l}.attn.q'].reshape(16, -1).T)
            for site in block:
                np.testing.assert_array_equal(held[f'model.layers.{l}.norms.{site}.weight'], named[f'layers.{l}.norm_{site}.gain'])
        config = json.loads((tmp_path / name / 'config.json').read_text())
        assert config['model_type'] == 'spannorm_jax' and config['spannorm']['topology'] == name


@pytest.mark.parametrize('kind', EXAMPLES)
def test_families_round_trip(kind, tmp_path):
    cfg = example(kind)
    params = random_params(cfg)
    assert save_hf(cfg, params, tmp_path / 'a', model_type=kind) == kind
    back, again = load_hf(tmp_path / 'a')
    assert back.topology == cfg.topology and unstack(back, again).keys() == unstack(cfg, params).keys()
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, two)
    # Theirs have no axis of heads.
    assert {v.ndim for k, v in load_file(tmp_path / 'a' / WHOLE).items() if 'proj' in k} <= {1, 2}
    assert all(v.ndim == 1 for k, v in load_file(tmp_path / 'a' / WHOLE).items() if k.endswith('.bias'))
    save_hf(back, again, tmp_path / 'b', model_type=kind)
    assert files(tmp_path / 'a') == files(tmp_path / 'b')


@pytest.mark.parametrize(
    ('kind', 'fields', 'why'),
    [
        ('llama', dict(name='span'), 'topology'),
        ('llama', dict(name='pre', qk_norm='head'), 'qk_norm'),
        ('llama', dict(name='pre', positions='rope_interleaved'), 'positions'),
        ('llama', dict(name='pre', activation='relu'), 'hidden_act'),
        ('llama', dict(name='pre', final_norm_eps=1e-3), 'final_norm_eps'),
        ('gemma2', dict(name='sandwich'), 'norm_unit_offset'),
        ('gemma2', EXAMPLES['gemma2'] | dict(name='sandwich', attn_soft_cap=5.0), 'attn_soft_cap'),
        ('olmo2', dict(name='reordered', qk_norm='whole', tie_embeddings=True, branch_scale=0.5), 'branch_scale'),
        ('deepseek_v3', dict(name='pre', **MOE | dict(shared_experts=0)), 'n_shared_experts'),
        ('gpt2', dict(name='pre'), "unknown model_type 'gpt2'"),
    ],
)
def test_a_family_that_cannot_express_the_model(kind, fields, why, tmp_path):
    cfg = tiny(**{k: v for k, v in fields.items() if k != 'topology'})
    with pytest.raises(UserError, match=why):
        save_hf(cfg, {}, tmp_path / 'x', model_type=kind)
    assert not any(tmp_path.iterdir())


def test_what_does_not_matter_to_the_function_does_not_hinder():
    assert not differences(tiny('pre', dtype='bfloat16', remat='full', init='own', dropout=0.1, document_mask=False), 'llama')


# ------------------------------------------------------------------- refusals


@pytest.fixture
def exported(tmp_path):
    def write(kind='llama', **config):
        folder = tmp_path / kind
        cfg = example(kind) if kind in EXAMPLES else tiny(kind)
        save_hf(cfg, random_params(cfg), folder, model_type=kind if kind in EXAMPLES else None)
        path = folder / 'config.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return write


@pytest.mark.parametrize(
    ('kind', 'config', 'message'),
    [
        ('llama', {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}}, "rope_scaling = 'llama3'"),
        ('llama', {'rope_parameters': {'type': 'yarn'}}, "rope_scaling = 'yarn'"),
        ('llama', {'rope_parameters': {'rope_theta': 5.0, 'partial_rotary_factor': 0.5}}, 'partial_rotary_factor'),
        ('llama', {'hidden_act': 'relu2'}, "hidden_act = 'relu2'"),
        ('llama', {'quantization_config': {'quant_method': 'fp8'}}, 'quantization_config'),
        ('llama', {'use_sliding_window': True}, 'use_sliding_window'),
        ('llama', {'model_type': 'lama'}, "model_type 'lama' is not read here; did you mean 'llama'"),
        ('gemma2', {'sliding_window': 512, 'layer_types': ['sliding_attention'] * 3}, 'sliding_window = '),
        ('gemma2', {'attn_logit_softcapping': 50.0}, 'attn_logit_softcapping'),
        ('gemma2', {'final_logit_softcapping': 30.0}, 'final_logit_softcapping'),
        ('olmo2', {'clip_qkv': 8.0}, 'clip_qkv'),
        ('deepseek_v2', {'norm_topk_prob': True}, 'norm_topk_prob'),
        ('deepseek_v2', {'topk_method': 'noaux_tc'}, 'topk_method'),
        ('deepseek_v3', {'attention_bias': True}, 'attention_bias'),
        ('deepseek_v3', {'scoring_func': 'softmax'}, 'scoring_func'),
        ('deepseek_v3', {'rope_scaling': {'type': 'yarn', 'factor': 40}}, "rope_scaling = 'yarn'"),
    ],
)
def test_features_are_refused_by_name(kind, config, message, exported):
    with pytest.raises(UserError, match=message):
        load_hf(exported(kind, **config))


def test_gemma2_without_a_word_has_caps_and_windows(exported):
    """What transformers assumes of keys that are not there counts too."""
    folder = exported('gemma2')
    config = json.loads((folder / 'config.json').read_text())
    for key in ('attn_logit_softcapping', 'final_logit_softcapping'):
        (folder / 'config.json').write_text(json.dumps({k: v for k, v in config.items() if k != key}))
        with pytest.raises(UserError, match=key):
            load_hf(folder)
    (folder / 'config.json').write_text(json.dumps({k: v for k, v in config.items() if k not in ('layer_types', 'sliding_window')}))
    with pytest.raises(UserError, match='sliding_window'):
        load_hf(folder)


def test_lacking_key_and_newer_format(exported):
    folder = exported()
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({k: v for k, v in config.items() if k != 'hidden_size'}))
    with pytest.raises(UserError, match="lacks 'hidden_size'"):
        load_hf(folder)
    (folder / 'config.json').write_text(json.dumps(config | {'hidden_size': 'wide'}))
    with pytest.raises((UserError, BadData), match='wide'):
        load_hf(folder)
    with pytest.raises(BadData, match='format 2, this package reads 1'):
        load_hf(exported('span', format=2))
    with pytest.raises(MissingInput, match='config.json'):
        load_hf(folder / 'nix')


def test_weights_that_do_not_fit(exported):
    folder = exported()
    held = load_file(folder / WHOLE)

    def refused(weights, message):
        save_file(weights, folder / WHOLE)
        with pytest.raises(BadData, match=message):
            load_hf(folder)

    name = 'model.layers.1.mlp.up_proj.weight'
    refused({k: v for k, v in held.items() if k != name}, f'lacks 1 weights: {name}')
    refused(held | {'model.extra.weight': np.zeros(2, np.float32)}, 'no part of this model reads: model.extra.weight')
    refused(held | {name: held[name].T.copy()}, r'up_proj.weight has shape \(16, 24\), config.json says \(24, 16\)')
    refused(held | {name: held[name].astype(np.int32)}, 'dtype int32')
    refused(held | {'lm_head.weight': held['model.embed_tokens.weight'] + 1}, 'ties the head')
    kept = {'lm_head.weight': held['model.embed_tokens.weight'], 'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(3, np.float32)}
    save_file(held | kept, folder / WHOLE)
    load_hf(folder)  # copies that mean nothing new


def test_damaged_files(exported):
    folder = exported()
    path = folder / WHOLE
    whole = path.read_bytes()
    length = struct.unpack('<Q', whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    name = 'lm_head.weight' if 'lm_head.weight' in header else 'model.norm.weight'

    def refused(data, message='not a whole safetensors file'):
        path.write_bytes(data)
        with pytest.raises(BadData, match=message):
            load_hf(folder)

    def with_header(**change):
        text = json.dumps(header | {name: header[name] | change}).encode()
        return struct.pack('<Q', len(text)) + text + whole[8 + length :]

    for data in (b'', whole[:5], whole[:50], whole[:-4], struct.pack('<Q', 2**60) + whole[8:], struct.pack('<Q', 2) + b'[]'):
        refused(data)
    refused(with_header(data_offsets=[0, 1 << 40]), 'lies at 0 to')
    refused(with_header(data_offsets=[-64, 0]))
    refused(with_header(shape=[-4, -4]))
    refused(with_header(dtype='F4'), 'of dtype F4')
    path.unlink()
    with pytest.raises(MissingInput, match=WHOLE):
        load_hf(folder)


LONG = 'x' * 300 + '.safetensors'


@pytest.mark.parametrize(
    'file', ['../secret.safetensors', '/etc/passwd', 'a/b.safetensors', 'weights.bin', '..', '', 'x\0.safetensors', LONG]
)
def test_an_index_cannot_reach_out_of_its_folder(file, exported):
    folder = exported()
    (folder / INDEX).write_text(json.dumps({'weight_map': {'model.norm.weight': file}}))
    with pytest.raises(BadData, match='the name of a .safetensors file beside it'):
        load_hf(folder)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'model_type': ['llama']}, 'is not read here'),
        ({'num_attention_heads': 0, 'head_dim': None}, 'cannot be read'),
        ({'rms_norm_eps': 10**400}, 'cannot be read'),
        ({'num_hidden_layers': 2**31 - 1}, 'says 2147483647 layers, the weights are'),
        ({'num_attention_heads': 2**29, 'num_key_value_heads': 1}, 'heads of 6, the weights are'),
    ],
)
def test_a_config_that_lies_is_answered_at_once(change, message, exported):
    """In a second and a few MB, not after listing what it says."""
    folder = exported()
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | change))
    begun, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=message):
        load_hf(folder)
    assert time.process_time() - begun < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 64 * 1024


def test_a_config_of_endless_experts(tmp_path):
    save_hf(example('deepseek_v3'), random_params(example('deepseek_v3')), tmp_path / 'new', model_type='deepseek_v3')
    config = json.loads((tmp_path / 'new' / 'config.json').read_text())
    (tmp_path / 'new' / 'config.json').write_text(json.dumps(config | {'n_routed_experts': 2**30}))
    with pytest.raises(BadData, match='layers of 1073741824 experts, the weights are'):
        load_hf(tmp_path / 'new')


def test_headers_that_lie_are_answered_at_once(exported):
    folder = exported()
    held = load_file(folder / WHOLE)

    def refused(header, message):
        text = json.dumps(header).encode()
        (folder / WHOLE).write_bytes(struct.pack('<Q', len(text)) + text)
        begun = time.process_time()
        with pytest.raises(BadData, match=message) as e:
            load_hf(folder)
        assert time.process_time() - begun < 5 and len(str(e.value)) < 2000

    whole = {'dtype': 'F32', 'data_offsets': [0, 0]}
    refused({'a': whole | {'shape': [2**62] * 200_000}}, 'has shape')  # a product of 12 million bits
    refused({'a': whole | {'shape': [1 << 4000]}}, 'has shape')
    refused({'a': whole | {'shape': [True, 0]}}, 'has shape')
    refused({'a' * 100_000: whole | {'shape': [3]}}, 'of shape')
    refused({'a': whole | {'dtype': ['F32'] * 9999, 'shape': [0]}}, 'unhashable')
    save_file(held | {f'model.layers.{"9" * 5000}.x': np.zeros(1, np.float32)}, folder / WHOLE)
    with pytest.raises(BadData, match='has 1 weights that no part'):
        load_hf(folder)


def test_json_that_is_too_long_is_not_read(exported):
    folder = exported()
    with (folder / INDEX).open('wb') as f:
        f.truncate(1 << 40)
    with pytest.raises(BadData, match='longer than 64 MiB'):
        load_hf(folder)


# ---------------------------------------------------------- files and memory


def test_files_are_those_of_the_library(tmp_path):
    """What we write, the library reads; what it writes, narrow floats and empty arrays too, we read."""
    cfg = tiny('span')
    params = random_params(cfg)
    save_hf(cfg, params, tmp_path / 'one')
    save_hf(cfg, params, tmp_path / 'many', shard_bytes=8000)
    whole = load_file(tmp_path / 'one' / WHOLE)
    shards = sorted(p.name for p in (tmp_path / 'many').glob('*.safetensors'))
    assert len(shards) > 3 and shards[0] == f'model-00001-of-{len(shards):05}.safetensors'
    assert all((tmp_path / 'many' / s).stat().st_size < 8000 + 4096 for s in shards[1:])
    parts = {k: v for s in shards for k, v in load_file(tmp_path / 'many' / s).items()}
    index = json.loads((tmp_path / 'many' / INDEX).read_text())
    assert index['metadata']['total_size'] == sum(v.nbytes for v in whole.values()) and set(index['weight_map']) == set(whole)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / 'many')[1], params)

    import ml_dtypes

    x = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
    kinds = {'half': x.astype(np.float16), 'brain': x.astype(ml_dtypes.bfloat16), 'double': x.astype(np.float64), 'none': x[:0]}
    save_file(kinds, tmp_path / 'kinds.safetensors')
    for name, entry in entries(tmp_path / 'kinds.safetensors').items():
        np.testing.assert_array_equal(entry.read(), kinds[name])


def test_one_array_at_a_time(tmp_path):
    """A parameter is a view of the file until it is asked for, and an export makes one array after the other."""
    cfg = tiny('span')
    save_hf(cfg, random_params(cfg), tmp_path / 'a')
    assert all(isinstance(e.read(), np.memmap) for e in folder_entries(tmp_path / 'a').values())
    from spannorm_jax.interop.safetensors import write_folder

    alive, most = set(), []

    class Counted(np.ndarray):
        def __del__(self):
            alive.discard(id(self))

    def make():
        array = np.zeros(1000, '<f4').view(Counted)
        alive.add(id(array))
        most.append(len(alive))
        return array

    write_folder(tmp_path, {str(i): ((1000,), make) for i in range(20)}, 10**9)
    assert len(most) == 20 and max(most) <= 2


def test_nothing_is_overwritten_or_left_half(tmp_path, monkeypatch):
    cfg = tiny('pre', layers=1)
    params = random_params(cfg)
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'mine').touch()
    with pytest.raises(UserError, match='is not empty'):
        save_hf(cfg, params, tmp_path / 'full')
    from spannorm_jax.interop import huggingface

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(huggingface, 'write_folder', fail)
        with pytest.raises(KeyboardInterrupt):
            save_hf(cfg, params, tmp_path / 'new')
    assert not (tmp_path / 'new').exists()
    for name in ('new', 'empty', 'x'):  # what others have there is nobody else's
        (tmp_path / f'{name}.part' / 'sub').mkdir(parents=True)
        (tmp_path / f'{name}.part' / 'sub' / 'mine').touch()
    save_hf(cfg, params, tmp_path / 'new')
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'link').symlink_to('empty')
    save_hf(cfg, params, tmp_path / 'link')
    assert {p.name for p in tmp_path.iterdir()} == {'full', 'new', 'empty', 'link', 'new.part', 'empty.part', 'x.part'}
    assert len(list(tmp_path.glob('*.part/sub/mine'))) == 3
    assert (tmp_path / 'link').is_symlink() and files(tmp_path / 'empty') == files(tmp_path / 'new')


def test_an_import_is_whole_or_not_there(tmp_path, monkeypatch):
    from spannorm_jax.checkpoint import Checkpoints
    from spannorm_jax.interop.runs import import_run

    cfg = tiny('pre', layers=1, vocab=257)
    save_hf(cfg, random_params(cfg), tmp_path / 'x', tokenizer=load_tokenizer('bytes'))

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(Checkpoints, 'save_params', fail)
        import_run(tmp_path / 'x', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
    import_run(tmp_path / 'x', tmp_path / 'run')
    assert {p.name for p in tmp_path.iterdir()} == {'x', 'run'}
    (tmp_path / 'x').rename(tmp_path / 'again.part')
    before = files(tmp_path / 'again.part')
    import_run(tmp_path / 'again.part', tmp_path / 'again')
    assert files(tmp_path / 'again.part') == before


def test_an_imported_run_is_not_trained(tmp_path):
    from fakes import FakeCorpus

    from spannorm_jax.interop.runs import import_run
    from spannorm_jax.train import fit

    cfg = tiny('pre', layers=1, vocab=257)
    save_hf(cfg, random_params(cfg), tmp_path / 'x', tokenizer=load_tokenizer('bytes'))
    imported = import_run(tmp_path / 'x', tmp_path / 'run', 16)
    with pytest.raises(UserError, match='was imported: it holds weights'):
        fit(edit(imported, {'run.dir': str(tmp_path / 'run'), 'mesh.devices': 1}), corpus=FakeCorpus())


def test_a_tokenizer_that_is_not_the_weights_own_is_refused(tmp_path, capsys):
    """Whatever works on a run's weights: what they say of another tokenizer's ids means nothing."""
    from spannorm_jax.interop.huggingface import byte_files

    cfg = tiny('pre', layers=1, vocab=257)
    save_hf(cfg, random_params(cfg), tmp_path / 'x', tokenizer=load_tokenizer('bytes'))
    own = byte_files()['tokenizer.json'] | {'truncation': {'direction': 'Right', 'max_length': 9, 'strategy': 'LongestFirst', 'stride': 0}}
    (tmp_path / 'x' / 'tokenizer.json').write_text(json.dumps(own))
    run, text = str(tmp_path / 'run'), tmp_path / 'text.txt'
    text.write_text('some text ' * 99)
    assert cli.main(['import', str(tmp_path / 'x'), run, '--seq', '16']) == 0
    vocab = own['model']['vocab']
    a, b = sorted(vocab)[:2]
    (tmp_path / 'run' / 'tokenizer' / 'tokenizer.json').write_text(
        json.dumps(own | {'model': own['model'] | {'vocab': vocab | {a: vocab[b], b: vocab[a]}}})
    )
    one = ['--mesh.devices', '1']
    for line in (['eval', run, '--source', str(text), *one], ['generate', run, *one], ['export', run, str(tmp_path / 'y')]):
        capsys.readouterr()
        assert cli.main(line) == 2
        assert 'has changed since its weights were saved' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['config.json', WHOLE, 'tokenizer.json', 'tokenizer_config.json'])
def test_a_folder_in_the_place_of_a_file(name, tmp_path, capsys):
    cfg = tiny('pre', layers=1, vocab=257)
    save_hf(cfg, random_params(cfg), tmp_path / 'x', tokenizer=load_tokenizer('bytes'))
    (tmp_path / 'x' / name).unlink()
    (tmp_path / 'x' / name).mkdir()
    code, said = cli.main(['import', str(tmp_path / 'x'), str(tmp_path / 'run')]), capsys.readouterr().err
    if name != 'tokenizer.json':  # which need not be there
        assert code in (65, 66) and name in said and not (tmp_path / 'run').exists()


def test_an_imported_run_can_be_moved(tmp_path):
    """Its tokenizer goes with it, and no path of this machine is written down."""
    from spannorm_jax.interop.huggingface import byte_files
    from spannorm_jax.interop.runs import import_run
    from spannorm_jax.score import load_run

    cfg = tiny('pre', layers=1, vocab=257)
    save_hf(cfg, random_params(cfg), tmp_path / 'x', tokenizer=load_tokenizer('bytes'))
    changed = byte_files()['tokenizer.json'] | {
        'truncation': {'direction': 'Right', 'max_length': 9, 'strategy': 'LongestFirst', 'stride': 0}
    }
    (tmp_path / 'x' / 'tokenizer.json').write_text(json.dumps(changed))
    import_run(tmp_path / 'x', tmp_path / 'run')
    assert str(tmp_path) not in (tmp_path / 'run' / 'config.json').read_text()
    (tmp_path / 'run').rename(tmp_path / 'moved')
    assert load_run(tmp_path / 'moved', MeshConfig(devices=1)).tokenizer.vocab == 257


def test_an_export_of_bytes_needs_no_library(tmp_path, monkeypatch):
    from spannorm_jax.interop.runs import import_run

    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    cfg = tiny('span', layers=1, vocab=257)
    save_hf(cfg, random_params(cfg), tmp_path / 'x', tokenizer=load_tokenizer('bytes'))
    assert import_run(tmp_path / 'x', tmp_path / 'run').data.tokenizer == 'bytes'
    (tmp_path / 'x' / 'tokenizer_config.json').write_text('{}')
    with pytest.raises(UserError, match='needs tokenizers'):
        import_run(tmp_path / 'x', tmp_path / 'other')


def test_a_topology_of_ones_own_exports_if_it_has_a_source(tmp_path):
    scope = {}
    exec('def quiet(x, attn, ffn, norm, c):\n    return x + attn(norm("attn_in", x)) + ffn(norm("ffn_in", x))\n', scope)
    topology.TOPOLOGIES['parallel'] = topology.Topology(scope['quiet'], 'y = x + A(N1 x) + F(N2 x)', 'none')
    try:
        cfg = tiny('parallel')
        with pytest.raises(UserError, match='the source of quiet cannot be copied'):
            save_hf(cfg, random_params(cfg), tmp_path / 'x')
        topology.TOPOLOGIES['parallel'] = topology.Topology(parallel, 'y = x + A(N1 x) + F(N2 x)', 'none')
        save_hf(cfg, random_params(cfg), tmp_path / 'x')
        assert 'def parallel(x, attn, ffn, norm, c):' in (tmp_path / 'x' / 'modeling_spannorm_jax.py').read_text()
    finally:
        del topology.TOPOLOGIES['parallel']


def parallel(x, attn, ffn, norm, c):
    return x + attn(norm('attn_in', x)) + ffn(norm('ffn_in', x))


# -------------------------------------------------------------------- torch


def torch_logits(folder, remote):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=remote, attn_implementation='eager')
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize('kind', EXAMPLES)
def test_transformers_opens_the_families(kind, tmp_path):
    cfg = example(kind)
    params = random_params(cfg)
    save_hf(cfg, params, tmp_path / 'x', model_type=kind)
    np.testing.assert_allclose(torch_logits(tmp_path / 'x', False), logits(cfg, params), atol=1e-4)


@pytest.mark.parametrize(('name', 'fields'), ROUND)
def test_transformers_opens_every_topology(name, fields, tmp_path):
    cfg = tiny(name, **fields)
    params = random_params(cfg)
    kind = save_hf(cfg, params, tmp_path / 'x')
    np.testing.assert_allclose(torch_logits(tmp_path / 'x', kind == 'spannorm_jax'), logits(cfg, params), atol=1e-4)


# ------------------------------------------------------------------- commands


def test_the_byte_tokenizer_as_a_file(tmp_path):
    """transformers' tokenizer.json of it gives the same ids and text."""
    from spannorm_jax.interop.huggingface import write_tokenizer

    ours = load_tokenizer('bytes')
    write_tokenizer(ours, tmp_path)
    theirs = load_tokenizer(str(tmp_path / 'tokenizer.json'))
    text = 'def f(x):\n\treturn "é€🙂" \x00\x7f  <|endoftext|>'
    np.testing.assert_array_equal(theirs.encode(text), ours.encode(text))
    assert (theirs.vocab, theirs.bos, theirs.eos) == (257, 256, 256) and theirs.decode(theirs.encode(text)) == text


def test_commands(trained, tmp_path, capsys):
    """A run exported, imported, exported again: the same files; the imported run generates and evaluates as the run does."""
    capsys.readouterr()
    assert cli.main(['export', trained, str(tmp_path / 'a'), '--json']) == 0
    assert json.loads(capsys.readouterr().out)['model_type'] == 'spannorm_jax'
    assert cli.main(['import', str(tmp_path / 'a'), str(tmp_path / 'run')]) == 0
    assert 'span, 2 x 16' in capsys.readouterr().out
    assert cli.main(['export', str(tmp_path / 'run'), str(tmp_path / 'b')]) == 0
    assert files(tmp_path / 'a') == files(tmp_path / 'b')
    beside = {'README.md', 'run_config.json', 'tokenizer.json', 'tokenizer_config.json', 'modeling_spannorm_jax.py'}
    assert {WHOLE, 'config.json'} | beside == set(files(tmp_path / 'a'))
    capsys.readouterr()
    said = []
    for folder in (trained, str(tmp_path / 'run')):
        assert cli.main(['generate', folder, '--prompt', 'doc', '--temperature', '0', '--max-tokens', '5', '--mesh.devices', '1']) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ('line', 'code', 'message'),
    [
        ('export RUN NEW --model-type llama', 2, 'cannot be written as llama: topology'),
        ('export RUN NEW --model-type lama', 2, "did you mean 'llama'?"),
        ('export RUN RUN', 2, 'is not empty'),
        ('export NEW NEW', 66, 'is not a run'),
        ('import NEW NEW', 66, 'is not a folder'),
        ('import RUN NEW', 2, 'model_type None is not read here'),
        ('export RUN .', 2, 'is the current folder'),
        ('export RUN RUN/config.json', 2, 'is a file; give a new folder'),
        ('export RUN RUN/config.json/new', 2, 'cannot make the folder'),
        ('export RUN NEW --shard-gb nan', 2, '--shard-gb = nan: expected a finite number'),
        ('export RUN NEW --shard-gb inf', 2, '--shard-gb = inf: expected a finite number'),
        ('export RUN NEW --topology-file nix.py', 66, "topology file 'nix.py' does not exist"),
    ],
)
def test_bad_input(line, code, message, trained, tmp_path, capsys):
    assert cli.main(line.replace('RUN', trained).replace('NEW', str(tmp_path / 'new')).split()) == code
    assert message in capsys.readouterr().err and not (tmp_path / 'new').exists()
