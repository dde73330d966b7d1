"""Algebra of several residual streams: Hyper-Connections and mHC. Streams are H (..., n, D); topology.py wires them."""

import math

import jax
import jax.numpy as jnp


def read_onehot(key, shape, q):
    """Static HC weights: column 0 reads stream q mod n (q = sublayer), the other columns keep every stream.  Source: eq. 14."""
    n = shape[0]
    return jnp.concatenate([jax.nn.one_hot(q % n, n)[:, None], jnp.eye(n)], axis=1)


def hc_weights(H_norm, alpha, beta, w_alpha, w_beta, s_alpha, s_beta, tanh=True):
    """alpha + s_a tanh(H_norm W_a): (B, T, n, n+1) and beta + s_b tanh(H_norm w_b): (B, T, n), from H_norm (B, T, n, D)."""
    act = jnp.tanh if tanh else lambda x: x
    return alpha + s_alpha * act(H_norm @ w_alpha), beta + s_beta * act(H_norm @ w_beta)


def hc_sublayer(H, sub, alpha, beta):
    """in = sum_s alpha[s,0] H_s; H'_t = sum_s alpha[s,t] H_s + beta[t] T(in), t = 1..n: the two terms of H'."""
    mixed = jnp.einsum('...sd,...st->...td', H, alpha)
    return mixed[..., 1:, :], beta[..., None] * sub(mixed[..., 0, :])[..., None, :]


def one_stream(key, shape, q):
    """+8 for stream q mod n, -8 for the others: the sigmoid reads one stream, so that at init every stream is PreNorm."""
    return 16 * jax.nn.one_hot(q % shape[0], shape[0]) - 8


def identity_mix(key, shape, q):
    """+8 on the diagonal and -8 off it: Sinkhorn of its exponential is close to the identity."""
    return 16 * jnp.eye(shape[0]) - 8


def sinkhorn(log_R, rounds, guard=0.0):
    """Rows of exp(log_R) (..., n, n) normalised to 1 after `rounds` alternations of columns, then rows, in log space.

    `guard` is added to every sum but the first, and to the entries after the first columns, as transformers' DeepSeek-V4 does.
    """
    add = (lambda x: jnp.logaddexp(x, math.log(guard))) if guard else lambda x: x
    log_R = add(log_R - jax.nn.logsumexp(log_R, axis=-2, keepdims=True))
    log_R -= add(jax.nn.logsumexp(log_R, axis=-1, keepdims=True))

    def alternate(log_R, _):
        log_R = log_R - add(jax.nn.logsumexp(log_R, axis=-2, keepdims=True))
        return log_R - add(jax.nn.logsumexp(log_R, axis=-1, keepdims=True)), None

    return jnp.exp(jax.lax.scan(alternate, log_R, length=rounds - 1)[0])


def unit_rms(H, eps):
    """RMS norm without gain over streams and channels together: H (..., n, D)."""
    return H * jax.lax.rsqrt(jnp.mean(H * H, axis=(-2, -1), keepdims=True) + eps)


def mhc_weights(H, P, b, a, rounds, eps, guard=0.0):
    """pre = sigmoid(a1 u P1 + b1) (n), post = 2 sigmoid(a2 u P2 + b2) (n), R = Sinkhorn(exp(a3 u P3 + b3)) (n, n); u = unit_rms(H).

    P, b, a hold three each: P1, P2 (n, D, n), P3 (n, D, n, n).  Source: mHC, arXiv:2512.24880, eqs. 6-9. DeepSeek-V4 in transformers
    adds a `guard` of 1e-6 to pre and inside Sinkhorn.
    """
    u = unit_rms(H, eps)
    pre, post = (a[i] * jnp.einsum('...nd,ndm->...m', u, P[i]) + b[i] for i in (0, 1))
    log_R = a[2] * jnp.einsum('...nd,ndts->...ts', u, P[2]) + b[2]
    return jax.nn.sigmoid(pre) + guard, 2 * jax.nn.sigmoid(post), sinkhorn(log_R, rounds, guard)


def mhc_sublayer(H, sub, weights):
    """x'_t = sum_s R[t,s] x_s + post[t] T(sum_s pre[s] x_s): the two terms of x'."""
    pre, post, R = weights
    o = sub(jnp.einsum('...s,...sd->...d', pre, H))
    return jnp.einsum('...ts,...sd->...td', R, H), post[..., None] * o[..., None, :]


def mhc_exit(H, P, b, a, eps, guard=0.0):
    """Streams to one by a learned sigmoid: sum_s (sigmoid(a u P + b) + guard)[s] x_s; P (n, D, n).  Source: transformers' DeepSeek-V4."""
    gate = jax.nn.sigmoid(a * jnp.einsum('...nd,ndm->...m', unit_rms(H, eps), P) + b) + guard
    return jnp.einsum('...s,...sd->...d', gate, H)
