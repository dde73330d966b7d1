"""An independent float64 oracle of every topology and sublayer: loops over layers, heads and positions, written from the papers' equations.

Nothing of the package is used but the fields of ModelConfig; parameters come by canonical name (`spannorm_jax.model.unstack`). Arrays are
NumPy's; with `xp=jax.numpy` under x64 the same text can be differentiated.
"""

import math

import numpy as np
from scipy.special import erf

NO_FINAL_NORM = ('post', 'span', 'b2t', 'deepnorm')
EMBED_NORM = ('span', 'peri')


class Oracle:
    """`Oracle(cfg, named).run(tokens)`: logits (B, T, V). Afterwards `seen` holds activations and `used` the parameters that were read."""

    def __init__(self, cfg, named, xp=np):
        self.cfg, self.xp = cfg, xp
        self.params = {k: xp.asarray(v, 'float64') for k, v in named.items()}
        self.used, self.seen = set(), {}

    def __getitem__(self, name):
        self.used.add(name)
        return self.params[name]

    def run(self, tokens, segments=None, positions=None):
        cfg, (B, T) = self.cfg, tokens.shape
        self.T = T
        self.positions = np.broadcast_to(np.arange(T), (B, T)) if positions is None else np.asarray(positions)
        self.real = np.ones((B, T), bool) if segments is None else np.asarray(segments) > 0
        segments = np.zeros((B, T), int) if segments is None else np.asarray(segments)
        self.may_see = np.array([[[s <= t and row[s] == row[t] for s in range(T)] for t in range(T)] for row in segments])
        E = self['embed'][tokens] * cfg.embed_scale
        self.seen['hidden/0'] = E
        features = self.seen['features'] = TOPOLOGIES[cfg.topology](self, E)
        logits = features @ (self['embed'].T if cfg.tie_embeddings else self['head']) * cfg.logit_scale
        return logits if cfg.logit_soft_cap is None else cfg.logit_soft_cap * self.xp.tanh(logits / cfg.logit_soft_cap)

    # ------------------------------------------------------------- norms

    def norm(self, name, x, eps=None):
        cfg, xp = self.cfg, self.xp
        if cfg.norm_input_guard:
            x = x / (abs(x).max() / 8)
        if cfg.norm == 'layernorm':
            x = x - x.mean(-1)[..., None]
        x = x / xp.sqrt((x**2).mean(-1)[..., None] + (cfg.norm_eps if eps is None else eps))
        gain = self[name + '.gain']
        x = x * (1 + gain if cfg.norm_unit_offset else gain)
        return x + self[name + '.bias'] if cfg.norm_bias else x

    def embed(self, x):
        wanted = self.cfg.topology in EMBED_NORM if self.cfg.embed_norm is None else self.cfg.embed_norm
        return self.norm('norm_embed', x) if wanted else x

    def final(self, x):
        wanted = self.cfg.topology not in NO_FINAL_NORM if self.cfg.final_norm is None else self.cfg.final_norm
        return self.norm('norm_final', x, self.cfg.final_norm_eps) if wanted else x

    def n(self, l, site, x):
        return self.norm(f'layers.{l}.norm_{site}', x)

    # --------------------------------------------------------- sublayers

    def attn(self, l, x, qkv=False, inner=False):
        """softmax(scale rot(q) rot(k)) v for one head after another, then the output projection."""
        cfg, xp, at = self.cfg, self.xp, f'layers.{l}.attn.'
        latent = cfg.attention == 'mla'
        K, H = cfg.kv_heads or cfg.heads, cfg.nope_dim + cfg.rope_dim if latent else cfg.head_dim or cfg.width // cfg.heads
        kinds = {'q': cfg.qk_norm, 'k': cfg.qk_norm, 'v': 'head' if cfg.v_norm else 'none'}
        if qkv:  # every head of q, k and v, whatever else is asked for
            kinds = {k: 'head' if kind == 'none' else kind for k, kind in kinds.items()}

        def latent_heads(name):
            """DeepSeek-V2, section 2.1: everything but the turned part of the keys comes from two small vectors."""
            if name == 'q':
                small = x if cfg.q_latent is None else self.norm(at + 'norm_q_a', x @ self[at + 'q_a'], cfg.latent_norm_eps)
            else:
                small = self.norm(at + 'norm_kv_a', x @ self[at + 'kv_a'], cfg.latent_norm_eps)
            z = [small @ self[at + name][:, h] for h in range(cfg.heads)]
            return [xp.concatenate([head, x @ self[at + 'k_rope']], -1) for head in z] if name == 'k' else z

        def project(name, heads):
            if latent:
                z = latent_heads(name)
            else:
                z = [x @ self[at + name][:, h] + (self[f'{at}{name}_bias'][h] if cfg.attn_bias else 0) for h in range(heads)]
            if kinds[name] == 'head':
                z = [self.norm(f'{at}norm_{name}', head) for head in z]
            if kinds[name] == 'whole':
                flat = self.norm(f'{at}norm_{name}', xp.concatenate(z, -1))
                z = [flat[..., h * H : (h + 1) * H] for h in range(heads)]
            if name == 'v':
                return z
            still = cfg.nope_dim if latent else 0
            return [xp.concatenate([head[..., :still], self.rotate(head[..., still:], H - still)], -1) for head in z]

        q, k, v = project('q', cfg.heads), project('k', K), project('v', K)
        scale = 1 / math.sqrt(H) if cfg.attn_scale is None else cfg.attn_scale
        heads = []
        for h in range(cfg.heads):
            g = h // (cfg.heads // K)
            score = scale * q[h] @ xp.swapaxes(k[g], -1, -2)
            if cfg.attn_soft_cap is not None:
                score = cfg.attn_soft_cap * xp.tanh(score / cfg.attn_soft_cap)
            weight = xp.where(self.may_see, xp.exp(score - score.max(-1)[..., None]), 0)
            heads.append(weight / weight.sum(-1)[..., None] @ v[g])
        out = xp.concatenate(heads, -1)
        if inner:
            out = self.norm(at + 'norm_inner', out)
        J = cfg.v_dim if latent else H
        out = sum(out[..., h * J : (h + 1) * J] @ self[at + 'o'][h] for h in range(cfg.heads))
        out = out + self[at + 'o_bias'] if cfg.attn_bias else out
        return out

    def rotate(self, x, H):
        """Each pair (a, b) of coordinates is a complex number, turned by position * theta^(-2i/H)."""
        cfg, xp = self.cfg, self.xp
        if cfg.positions == 'none':
            return x
        out = [None] * H
        for i in range(H // 2):
            a, b = (2 * i, 2 * i + 1) if cfg.positions == 'rope_interleaved' else (i, i + H // 2)
            angle = self.positions * cfg.rope_theta ** (-2 * i / H)
            out[a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
            out[b] = x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle)
        return xp.stack(out, -1)

    def ffn(self, l, x, inner=False):
        if self.cfg.experts and l >= self.cfg.first_dense:
            return self.mixture(l, x, inner)
        return self.mlp(f'layers.{l}.ffn.', x, inner)

    def mlp(self, at, x, inner):
        cfg = self.cfg
        linear = lambda name, z: z @ self[at + name] + (self[f'{at}{name}_bias'] if cfg.mlp_bias else 0)  # noqa: E731
        if cfg.activation in ('swiglu', 'geglu', 'geglu_tanh'):
            h = self.act(cfg.activation, linear('gate', x)) * linear('up', x)
        else:
            h = self.act(cfg.activation, linear('up', x))
        return linear('down', self.norm(at + 'norm_inner', h) if inner else h)

    def mixture(self, l, x, inner):
        """Token by token and choice by choice; the choices are made with NumPy, because they have no gradient."""
        cfg, xp, at = self.cfg, self.xp, f'layers.{l}.ffn.'
        E, K = cfg.experts, cfg.experts_per_token
        logits = x @ self[at + 'router']
        if cfg.router == 'sigmoid':
            score = 1 / (1 + xp.exp(-logits))
        else:
            score = xp.exp(logits - logits.max(-1)[..., None])
            score = score / score.sum(-1)[..., None]
        biased = cfg.router == 'sigmoid' if cfg.router_bias is None else cfg.router_bias
        normed = cfg.router == 'sigmoid' if cfg.router_normalize is None else cfg.router_normalize
        chosen = self.choices(at, score, biased)
        self.seen |= {f'router/{l}/logits': logits, f'router/{l}/topk_idx_sorted': chosen}
        place = (chosen[..., None] == np.arange(E)).any(-2)  # B, T, E
        weight = xp.where(place, score, 0)
        if normed:
            weight = weight / (weight.sum(-1)[..., None] + 1e-20)
        weight = weight * cfg.router_scale
        if cfg.capacity_factor is not None:
            room = min(self.T, math.ceil(cfg.capacity_factor * self.T * K / E))
            place = place & self.real[..., None]
            weight = xp.where(place & (xp.cumsum(place, 1) <= room), weight, 0)
        weight = xp.where(self.real[..., None], weight, 0)
        out = 0
        for e in range(E):
            parts = {
                k: self[at + k][e] for k in ('gate', 'up', 'down') if k != 'gate' or cfg.activation in ('swiglu', 'geglu', 'geglu_tanh')
            }
            h = self.act(cfg.activation, x @ parts.get('gate', parts['up']))
            h = h * (x @ parts['up']) if 'gate' in parts else h
            if inner:
                h = h - h.mean(-1)[..., None] if cfg.norm == 'layernorm' else h
                gain = self[at + 'norm_inner_gain'][e]
                h = h / xp.sqrt((h**2).mean(-1)[..., None] + cfg.norm_eps) * (1 + gain if cfg.norm_unit_offset else gain)
                h = h + self[at + 'norm_inner_bias'][e] if cfg.norm_bias else h
            out = out + weight[..., e, None] * (h @ parts['down'])
        return out + self.mlp(at + 'shared.', x, inner) if cfg.shared_experts else out

    def choices(self, at, score, biased):
        """Indices of the chosen experts, ascending, (B, T, K); of equals the first."""
        cfg, E, G = self.cfg, self.cfg.experts, self.cfg.expert_groups
        ranked = score + (self[at + 'router_bias'] if biased else 0)

        def one(row):
            group = [sorted(row[g * E // G : (g + 1) * E // G])[::-1] for g in range(G)]
            worth = [sum(g[:2]) if biased else g[0] for g in group]
            best = sorted(range(G), key=lambda g: (-worth[g], g))[: cfg.groups_per_token]
            left = [e for e in range(E) if e * G // E in best]
            return sorted(sorted(left, key=lambda e: (-row[e], e))[: cfg.experts_per_token])

        every = lambda ranked: np.array([[one(row) for row in rows] for rows in np.asarray(ranked)], np.int32)  # noqa: E731
        if self.xp is np:
            return every(ranked)
        import jax

        shape = jax.ShapeDtypeStruct((*ranked.shape[:2], cfg.experts_per_token), np.int32)
        return jax.pure_callback(every, shape, jax.lax.stop_gradient(ranked))

    def act(self, kind, x):
        xp = self.xp
        if kind == 'swiglu':
            return x / (1 + xp.exp(-x))
        if kind == 'relu':
            return xp.maximum(x, 0)
        if kind.endswith('tanh'):
            return x / 2 * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        if xp is not np:
            from jax.scipy.special import erf as jax_erf

            return x / 2 * (1 + jax_erf(x / math.sqrt(2)))
        return x / 2 * (1 + erf(x / math.sqrt(2)))

    def branch(self, l, site, o):
        """Learned factor, then the constant one."""
        if self.cfg.branch_gain != 'none':
            o = o * self[f'layers.{l}.{site}_gain']
        return o * self.cfg.branch_scale

    def saw(self, l, middle, leaving, second=None):
        """Record block l (from 0): the stream after attention and after the block, and the second stream."""
        self.seen |= {f'mid/{l + 1}': middle, f'hidden/{l + 1}': leaving, f'second/{l + 1}': second}
        return leaving

    @property
    def layers(self):
        return range(self.cfg.layers)


# ----------------------------------------------------------------- topologies
# Each takes the oracle and the scaled embedding E, and returns what the head reads.


def pre_block(o, l, x):
    y = x + o.branch(l, 'attn', o.attn(l, o.n(l, 'attn_in', x)))
    return o.saw(l, y, y + o.branch(l, 'ffn', o.ffn(l, o.n(l, 'ffn_in', y))))


def post_block(o, l, x, alpha=1.0):
    y = o.n(l, 'attn_sum', alpha * x + o.attn(l, x))
    return o.saw(l, y, o.n(l, 'ffn_sum', alpha * y + o.ffn(l, y)))


def pre(o, E):
    x = o.embed(E)
    for l in o.layers:
        x = pre_block(o, l, x)
    return o.final(x)


def post(o, E):
    x = o.embed(E)
    for l in o.layers:
        x = post_block(o, l, x)
    return o.final(x)


def span(o, E):
    """Reading A: N_e(E) feeds the first attention alone. Reading B: it is also both skips of the first block."""
    x, into = E, o.embed(E)
    if o.cfg.first_skip == 'normed':
        x = into
    for l in o.layers:
        y = o.n(l, 'attn_sum', o.attn(l, into if l == 0 else x) + x)
        x = o.ffn(l, y) + x
        x = o.n(l, 'ffn_sum', x) if o.cfg.block_end == 'norm' else x * o[f'layers.{l}.end_gain'] + o[f'layers.{l}.end_bias']
        o.saw(l, y, x)
    return o.final(x)


def b2t(o, E):
    x = o.embed(E)
    for l in o.layers:
        y = o.n(l, 'attn_sum', x + o.attn(l, x))
        x = o.saw(l, y, o.n(l, 'ffn_sum', x + y + o.ffn(l, y)))
    return o.final(x)


def hybrid(o, E, star=False):
    x = o.embed(E)
    for l in o.layers:
        first = star and l == 0
        h = x + o.attn(l, o.n(l, 'attn_in', x) if first else x, qkv=True)
        z = o.n(l, 'ffn_in', h)
        x = o.saw(l, h, (h if first else z) + o.ffn(l, z))
    return o.final(x)


def hybrid_star(o, E):
    return hybrid(o, E, star=True)


def peri(o, E):
    x = o.embed(E)
    for l in o.layers:
        y = x + o.branch(l, 'attn', o.n(l, 'attn_branch', o.attn(l, o.n(l, 'attn_in', x))))
        x = o.saw(l, y, y + o.branch(l, 'ffn', o.n(l, 'ffn_branch', o.ffn(l, o.n(l, 'ffn_in', y)))))
    return o.final(x)


def reordered(o, E):
    x = o.embed(E)
    for l in o.layers:
        y = x + o.branch(l, 'attn', o.n(l, 'attn_branch', o.attn(l, x)))
        x = o.saw(l, y, y + o.branch(l, 'ffn', o.n(l, 'ffn_branch', o.ffn(l, y))))
    return o.final(x)


def mixln(o, E):
    x, n_post = o.embed(E), int(np.floor(o.cfg.post_fraction * o.cfg.layers + 0.5))
    for l in o.layers:
        x = post_block(o, l, x) if l < n_post else pre_block(o, l, x)
    return o.final(x)


def lns(o, E):
    x = o.embed(E)
    for l in o.layers:
        s = 1 / math.sqrt(l + 1)
        y = x + o.attn(l, s * o.n(l, 'attn_in', x))
        x = o.saw(l, y, y + o.ffn(l, s * o.n(l, 'ffn_in', y)))
    return o.final(x)


def deepnorm(o, E):
    x, alpha = o.embed(E), (2 * o.cfg.layers) ** 0.25 if o.cfg.alpha is None else o.cfg.alpha
    for l in o.layers:
        x = post_block(o, l, x, alpha)
    return o.final(x)


def residual(o, E):
    x, s = o.embed(E), o.cfg.residual_scale
    r = s * x
    for l in o.layers:
        a = o.attn(l, x)
        y = o.n(l, 'attn_sum', x + a)
        f = o.ffn(l, y)
        r = r + s * a + s * f
        x = o.saw(l, y, o.n(l, 'ffn_sum', y + f), r)
    return o.cfg.residual_exit_scale * x + o.final(r)


def siamese(o, E):
    X = Y = o.embed(E)
    extra = o.n if o.cfg.siamese_input_norm else lambda l, site, x: x
    for l in o.layers:
        s = 1 / math.sqrt(l + 1)
        a = o.attn(l, extra(l, 'attn_in', X + o.n(l, 'attn_y', Y)))
        X, Y = o.n(l, 'attn_sum', X + s * a), Y + a
        middle = X
        f = o.ffn(l, extra(l, 'ffn_in', X + o.n(l, 'ffn_y', Y)))
        X, Y = o.n(l, 'ffn_sum', X + s * f), Y + f
        o.saw(l, middle, X, Y)
    return X + o.final(Y)


def siamese_olmo(o, E):
    X = Y = o.embed(E)
    for l in o.layers:
        s = 1 / math.sqrt(2 * (l + 1))
        a = o.attn(l, o[f'layers.{l}.c1'] * X + o.n(l, 'attn_y', Y), qkv=True)
        X, Y = o.n(l, 'attn_sum', X + s * a), Y + a
        middle = X
        f = o.ffn(l, o.n(l, 'ffn_in', X + o.n(l, 'ffn_y', Y)))
        X, Y = X + s * f, Y + f
        o.saw(l, middle, X, Y)
    return o.final(o.norm('norm_final_x', X) + o.norm('norm_final_y', Y))


def keel(o, E):
    x, alpha = o.embed(E), 2 * o.cfg.layers if o.cfg.alpha is None else o.cfg.alpha
    for l in o.layers:
        attention = o.attn(l, o.n(l, 'attn_in', x))
        plain = l == 0 and o.cfg.first_block == 'paper'
        y = x + attention if plain else o.n(l, 'attn_sum', alpha * x + attention)
        x = o.saw(l, y, o.n(l, 'ffn_sum', (1 if plain else alpha) * y + o.ffn(l, o.n(l, 'ffn_in', y))))
    return o.final(x)


def normformer(o, E):
    x, N = o.embed(E), o.cfg.heads
    for l in o.layers:
        a, w = o.attn(l, o.n(l, 'attn_in', x)), o.cfg.width // N
        gain = o[f'layers.{l}.head_gain']
        a = o.xp.concatenate([gain[h] * a[..., h * w : (h + 1) * w] for h in range(N)], -1)
        y = x + o.n(l, 'attn_branch', a)
        skip = o[f'layers.{l}.resid_gain'] * y if o.cfg.resid_gain else y
        x = o.saw(l, y, skip + o.ffn(l, o.n(l, 'ffn_in', y), inner=True))
    return o.final(x)


def subln(o, E):
    x = o.embed(E)
    for l in o.layers:
        y = x + o.attn(l, o.n(l, 'attn_in', x), inner=True)
        x = o.saw(l, y, y + o.ffn(l, o.n(l, 'ffn_in', y), inner=True))
    return o.final(x)


def hc(o, E):
    """n streams as a list; alpha[s][0] reads stream s into the branch, alpha[s][t] carries it to stream t, beta[t] writes the branch."""
    n = o.cfg.streams
    streams = [o.embed(E)] * n
    act = o.xp.tanh if o.cfg.hc_tanh else lambda z: z
    for l in o.layers:
        for name, sub in (('attn', o.attn), ('ffn', o.ffn)):
            p = lambda k, at=f'layers.{l}.{name}_': o[at + k]  # noqa: E731
            normed = [o.n(l, f'{name}_streams', h) for h in streams]
            alpha = [p('alpha')[s] + p('alpha_scale') * act(normed[s] @ p('alpha_w')) for s in range(n)]
            beta = [p('beta')[t] + p('beta_scale') * act(normed[t] @ p('beta_w')) for t in range(n)]
            carry = [sum(alpha[s][..., t, None] * streams[s] for s in range(n)) for t in range(n + 1)]
            out = sub(l, o.n(l, f'{name}_in', carry[0]))
            streams = [carry[t + 1] + beta[t][..., None] * out for t in range(n)]
    return o.final(sum(streams))


def flat_rms(o, streams):
    """All streams as one vector per token, divided by its rms (no gain)."""
    v = o.xp.stack(streams, -2)
    return v / o.xp.sqrt((v**2).mean((-1, -2))[..., None, None] + o.cfg.norm_eps)


def mhc(o, E):
    n, xp = o.cfg.streams, o.xp
    sigmoid = lambda z: 1 / (1 + xp.exp(-z))  # noqa: E731
    streams = [o.embed(E)] * n
    for l in o.layers:
        for name, sub in (('attn', o.attn), ('ffn', o.ffn)):
            u = flat_rms(o, streams)

            def raw(k, tail, u=u, at=f'layers.{l}.{name}_{{}}_'.format):
                return o[at(k) + 'a'] * xp.einsum(f'btnd,nd{tail}->bt{tail}', u, o[at(k) + 'w']) + o[at(k) + 'b']

            read, write = sigmoid(raw('pre', 'm')), 2 * sigmoid(raw('post', 'm'))
            R = xp.exp(raw('mix', 'xy'))
            for _ in range(o.cfg.sinkhorn_rounds):
                R = R / R.sum(-2)[..., None, :]
                R = R / R.sum(-1)[..., None]
            out = sub(l, o.n(l, f'{name}_in', sum(read[..., s, None] * streams[s] for s in range(n))))
            mixed = [sum(R[..., t, s, None] * streams[s] for s in range(n)) for t in range(n)]
            streams = [mixed[t] + write[..., t, None] * out for t in range(n)]
    if o.cfg.stream_exit == 'sum':
        return o.final(sum(streams))
    gate = sigmoid(o['exit_a'] * xp.einsum('btnd,ndm->btm', flat_rms(o, streams), o['exit_w']) + o['exit_b'])
    return o.final(sum(gate[..., s, None] * streams[s] for s in range(n)))


TOPOLOGIES = {
    'pre': pre, 'post': post, 'span': span, 'b2t': b2t, 'hybrid': hybrid, 'hybrid_star': hybrid_star, 'peri': peri, 'reordered': reordered,
    'mixln': mixln, 'lns': lns, 'deepnorm': deepnorm, 'sandwich': peri, 'residual': residual, 'siamese': siamese,
    'siamese_olmo': siamese_olmo, 'keel': keel, 'normformer': normformer, 'subln': subln, 'hc': hc, 'mhc': mhc,
}  # fmt: skip
