"""The configuration of a model: its topology, sublayers and initial values."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from spannorm_jax import parametrization
from spannorm_jax import topology as topologies
from spannorm_jax.errors import UserError
from spannorm_jax.fields import check_range, check_types, positive

GATED = ('swiglu', 'geglu', 'geglu_tanh')
MLA = ('q_latent', 'kv_latent', 'nope_dim', 'rope_dim', 'v_dim', 'latent_norm_eps')
MOE = (
    'experts_per_token', 'expert_ffn', 'shared_experts', 'first_dense', 'router', 'router_bias', 'router_normalize', 'router_scale',
    'expert_groups', 'groups_per_token', 'capacity_factor', 'expert_exchange', 'balance',
)  # fmt: skip


KEPT = 'kept'  # the name that marks values for `remat` dots to keep, beside the results of plain products


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Transformer: one topology over shared sublayers. Axis letters are those of layers.py."""

    topology: str = 'span'
    """Name or alias of an entry of TOPOLOGIES (`spannorm topologies` prints them)."""
    layers: int = 12
    """Number of blocks L (attention + FFN = one block)."""
    width: int = 128
    """Residual width D."""
    heads: int = 4
    """Query heads N."""
    kv_heads: int | None = None
    """Key/value heads K; None means as many as query heads."""
    head_dim: int | None = None
    """Head dimension H; None means width / heads."""
    ffn: int | None = None
    """Hidden width F of the FFN; None means 8/3 width when gated and 4 width otherwise, rounded up to a multiple of 8."""
    vocab: int = 257
    """Vocabulary size V. 257 = 256 bytes and the document separator."""

    attention: Literal['gqa', 'mla'] = 'gqa'
    """gqa: multi-head or grouped-query attention. mla: latent attention, whose keys and values come from one small vector per token."""
    q_latent: int | None = None
    """mla: width of the compressed queries; None projects them from the stream directly."""
    kv_latent: int = 512
    """mla: width of the vector that keys and values come from."""
    nope_dim: int = 128
    """mla: dimensions per head of queries and keys without position."""
    rope_dim: int = 64
    """mla: dimensions per head of queries and keys with RoPE; that part of the key is one for all heads."""
    v_dim: int = 128
    """mla: dimensions per head of the values."""
    latent_norm_eps: float = 1e-6
    """mla: eps of the norms of the compressed vectors."""

    experts: int = 0
    """Routed experts per block E; 0 makes every FFN dense."""
    experts_per_token: int = 2
    """Routed experts that each token chooses."""
    expert_ffn: int | None = None
    """Hidden width of one expert; None means that of the dense FFN over the number of experts a token sees, in multiples of 8."""
    shared_experts: int = 0
    """Experts that see every token, as one FFN of this many times expert_ffn."""
    first_dense: int = 0
    """Blocks, from the bottom, whose FFN stays dense."""
    router: Literal['sigmoid', 'softmax'] = 'sigmoid'
    """Score of an expert: sigmoid of its logit (DeepSeek-V3), or softmax over all experts."""
    router_bias: bool | None = None
    """Add a bias that only the choice sees, moved by the load; None means with sigmoid scores."""
    router_normalize: bool | None = None
    """Divide the scores of the chosen experts by their sum; None means with sigmoid scores."""
    router_scale: float = 1.0
    """Factor on the weights of the routed experts."""
    expert_groups: int = 1
    """Groups of experts, of which a token uses groups_per_token."""
    groups_per_token: int = 1
    capacity_factor: float | None = None
    """None drops no token. Else an expert takes at most this many times its even share of each row, first come first served."""
    expert_exchange: Literal['padded', 'ragged', 'dense'] = 'padded'
    """How tokens travel over mesh.expert: with the empty places, which every platform can, or without (TPU v5p, v6e, GPU). dense: not at
    all; every expert computes every token, E / K times the work, and derivatives of any order exist (diagnostics use it)."""
    balance: Literal['sequence', 'batch'] = 'sequence'
    """Over what the balance loss (optim.balance_loss) counts the load: each row, or the whole micro-batch."""

    activation: Literal['swiglu', 'geglu', 'geglu_tanh', 'gelu', 'gelu_tanh', 'relu'] = 'swiglu'
    """FFN kind. swiglu and geglu are gated: down(act(gate x) * up x)."""
    norm: Literal['rmsnorm', 'layernorm'] = 'rmsnorm'
    norm_eps: float = 1e-6
    norm_unit_offset: bool = False
    """Multiply by (1 + w), w initialised to 0, as Gemma does."""
    norm_bias: bool = False
    """Add a learned bias after the gain (LayerNorm of fairseq and torchscale)."""
    final_norm_eps: float | None = None
    """eps of the final norm alone; None means norm_eps."""
    final_norm: bool | None = None
    """Norm before the head; None means the topology's default."""
    embed_norm: bool | None = None
    """Norm of the (scaled) embedding; None means the topology's default."""

    positions: Literal['rope_half', 'rope_interleaved', 'none'] = 'rope_half'
    rope_theta: float = 10_000.0
    attn_scale: float | None = None
    """Factor on the attention scores; None means head_dim ** -0.5."""
    qk_norm: Literal['none', 'head', 'whole'] = 'none'
    """Norm of queries and keys before RoPE: over each head, or over all heads at once (OLMo 2)."""
    v_norm: bool = False
    """Norm of the values too, over each head."""
    attn_kernel: Literal['auto', 'xla', 'splash', 'cudnn', 'blocked'] = 'auto'
    """auto: the fastest one that can do it on the devices at hand. splash (TPU), cudnn (GPU), blocked (CPU), xla (everywhere)."""
    document_mask: bool = True
    """Attention stays within a document, and positions start again in each; else a row is one document."""
    attn_bias: bool = False
    """Biases on q, k, v and the attention output projection."""
    mlp_bias: bool = False
    """Biases on every FFN projection."""
    attn_soft_cap: float | None = None
    """cap * tanh(scores / cap) before the mask (Gemma 2)."""
    logit_soft_cap: float | None = None
    """cap * tanh(logits / cap)."""
    tie_embeddings: bool = False

    embed_scale: float = 1.0
    """Factor on the embedding, before any embedding norm (sqrt(width) in Gemma and fairseq)."""
    branch_scale: float = 1.0
    """Constant factor on each branch, after its output norm where there is one."""
    logit_scale: float = 1.0
    """Constant factor on the logits."""
    branch_gain: Literal['none', 'scalar', 'vector'] = 'none'
    """Learned factor on each branch: one scalar (ReZero, SkipInit) or one per channel (LayerScale)."""
    branch_gain_init: float = 0.0
    """Initial value of that learned factor."""

    first_skip: Literal['raw', 'normed'] = 'raw'
    """span: skip of the first block. raw = reading A (only its attention input is normed), normed = reading B."""
    block_end: Literal['norm', 'affine'] = 'norm'
    """span: what ends a block, its norm or a learned scale and offset in its place."""
    post_fraction: float = 0.25
    """mixln: share of the blocks, from the bottom, that are PostNorm (rounded to whole blocks)."""
    alpha: float | None = None
    """deepnorm, keel: factor on the skip; None means the paper's (2L)^(1/4) and 2L."""
    beta: float | None = None
    """deepnorm, own init: gain of v, o and the FFN; None means (8L)^(-1/4)."""
    first_block: Literal['paper', 'uniform'] = 'paper'
    """keel: the paper's exceptions in the first block, or none."""
    residual_scale: float = 1.0
    """residual: factor s on what enters the second stream."""
    residual_exit_scale: float = 1.0
    """residual: factor on the first stream at the exit."""
    siamese_input_norm: bool = False
    """siamese: one more norm on the input of each sublayer."""
    resid_gain: bool = False
    """normformer: learned vector on the skip of the FFN."""
    streams: int = 4
    """hc, mhc: number n of residual streams."""
    hc_tanh: bool = True
    """hc: tanh on the dynamic part."""
    sinkhorn_rounds: int = 20
    """mhc: rounds of column and row normalisation."""
    stream_exit: Literal['sum', 'learned'] = 'sum'
    """mhc: how the streams become one before the final norm."""
    norm_input_guard: bool = False
    """Divide the input of every norm by max|x| / 8 over the whole tensor (CogView's fp16 guard; the batch is seen through eps)."""

    init: Literal['common', 'own'] = 'common'
    """common: one recipe for every topology. own: the topology's published recipe, which the three fields below do not change."""
    init_std: float | None = None
    """common: base std of every matrix; None means 1 / sqrt(fan_in)."""
    embed_std: float | None = None
    """common: std of the embedding; None means init_std where that is given, else 1, or 1 / sqrt(width) where it is tied to the head."""
    scale_init: Literal['none', 'sqrt_L', 'sqrt_2L'] = 'sqrt_2L'
    """common: divide the std of every matrix that writes to the residual stream by sqrt(L) or sqrt(2L)."""

    parametrization: Literal['standard', 'mup', 'completep'] = 'standard'
    """How initial values, rates and factors follow width (mup) and depth as well (completep), from a base model: parametrization.py."""
    base_width: int | None = None
    """mup, completep: width of the base model."""
    base_head_dim: int | None = None
    """mup, completep: head dimension of the base model; scores are scaled by sqrt(base_head_dim) / head_dim."""
    base_layers: int | None = None
    """completep: layers of the base model."""
    depth_alpha: float = 1.0
    """completep: branches are scaled by (layers / base_layers) ** -depth_alpha; 1/2 is depth-muP."""

    dropout: float = 0.0
    """Dropout on the output of each branch and on the embedding, in training only."""
    dtype: Literal['float32', 'bfloat16', 'float64'] = 'float32'
    """Dtype of the matrix products. Parameters, norm statistics, softmax and logits stay float32. float64 (tests) needs jax_enable_x64."""
    residual_dtype: Literal['float32', 'bfloat16', 'float64'] = 'float32'
    """Dtype of the residual stream between blocks. Sums are computed in float32 whatever this says, but bfloat16 rounds what leaves a
    block (of one that ends in RMSNorm, the sum that the next block norms): a branch below 1/256 of its skip (keel and deepnorm at depth)
    is then partly lost."""
    remat: Literal['none', 'dots', 'full', 'sqrt'] = 'dots'
    """Rematerialisation: keep everything; or the results of a block's matrix products and of attention (of cuDNN's kernel not: it runs
    again), since what is between them is cheaper to compute again than to keep; or only the input of each block; or only that of each of
    about sqrt(L) groups of blocks, and while a group is worked back those of its blocks, for one more forward pass (Chen et al. 2016,
    arXiv:1604.06174). Groups are of equal size, so a prime number of equal blocks has none, and is as full."""
    scan_unroll: int = 1
    """Blocks per step of the scan over layers; 0 unrolls all of them. Parameters and numbers do not depend on it."""

    def __post_init__(self):
        check_types(self)
        object.__setattr__(self, 'topology', topologies.canonical(self.topology))
        sizes = (
            'layers', 'width', 'heads', 'vocab', 'streams', 'sinkhorn_rounds', 'kv_heads', 'head_dim', 'ffn', 'q_latent', 'kv_latent',
            'nope_dim', 'rope_dim', 'v_dim', 'experts_per_token', 'expert_ffn', 'expert_groups', 'groups_per_token',
            'base_width', 'base_head_dim', 'base_layers',
        )  # fmt: skip
        for name in sizes:
            if getattr(self, name) is not None:
                positive(self, name)
        check_range(self, ('experts', 'shared_experts', 'first_dense', 'router_scale'), 0)
        check_range(self, ('capacity_factor',), 0, open_low=True)
        self._check_heads()
        if self.experts:
            self._check_experts()
        check_range(self, ('post_fraction', 'dropout'), 0, 1)
        check_range(self, ('depth_alpha',), 0.5, 1)
        check_range(self, ('norm_eps', 'final_norm_eps', 'scan_unroll', 'init_std', 'embed_std'), 0)
        check_range(self, ('rope_theta', 'attn_soft_cap', 'logit_soft_cap'), 0, open_low=True)
        # A field that changes nothing here would split identical runs, or hide a mistake: say so instead of ignoring it.
        own = topologies.TOPOLOGIES[self.topology].options
        for f in dataclasses.fields(self):
            if f.name in topologies.OPTIONS and f.name not in own and getattr(self, f.name) != f.default:
                readers = [n for n, t in topologies.TOPOLOGIES.items() if f.name in t.options]
                raise UserError(f'model.{f.name} has no effect on topology {self.topology!r}; it is read by {", ".join(readers)}')

        idle = {
            "init = 'own'": ('init_std', 'embed_std', 'scale_init') if self.init == 'own' else (),
            "init = 'common'": ('beta',) if self.init == 'common' else (),
            "branch_gain = 'none'": ('branch_gain_init',) if self.branch_gain == 'none' else (),
            "attention = 'gqa'": MLA if self.attention == 'gqa' else (),
            "attention = 'mla'": ('kv_heads', 'head_dim', 'attn_bias') if self.attention == 'mla' else (),
            'experts = 0': MOE if not self.experts else (),
            f'parametrization = {self.parametrization!r}': parametrization.UNUSED[self.parametrization],
        }
        for why, names in idle.items():
            for f in dataclasses.fields(self):
                if f.name in names and getattr(self, f.name) != f.default:
                    raise UserError(f'model.{f.name} has no effect with model.{why}; leave it out or change the other')
        parametrization.check(self)

    def _check_heads(self) -> None:
        if self.attention == 'gqa' and self.head_dim is None and self.width % self.heads:
            raise UserError(
                f'model.heads = {self.heads} does not divide model.width = {self.width}; set model.head_dim or change one of them'
            )
        if self.heads % self.resolved_kv_heads:
            raise UserError(f'model.kv_heads = {self.resolved_kv_heads} does not divide model.heads = {self.heads}')
        if self.positions != 'none' and self.rotated_dim % 2:
            field = 'rope_dim' if self.attention == 'mla' else 'head_dim'
            raise UserError(f'RoPE needs an even number of dimensions, got {self.rotated_dim}; set model.{field} or model.positions none')
        if self.topology == 'normformer' and self.width % self.heads:
            raise UserError(
                f'normformer has a gain per head on the stream: model.heads = {self.heads} must divide model.width = {self.width}'
            )

    def _check_experts(self) -> None:
        E, groups = self.experts, self.expert_groups
        if self.experts_per_token > E:
            raise UserError(f'model.experts_per_token = {self.experts_per_token} is more than model.experts = {E}')
        if E % groups:
            raise UserError(f'model.expert_groups = {groups} does not divide model.experts = {E}')
        if self.groups_per_token > groups:
            raise UserError(f'model.groups_per_token = {self.groups_per_token} is more than model.expert_groups = {groups}')
        if self.experts_per_token > self.groups_per_token * E // groups:
            raise UserError(
                f'model.experts_per_token = {self.experts_per_token}, but model.groups_per_token = {self.groups_per_token} groups of '
                f'{E // groups} hold only {self.groups_per_token * E // groups} experts'
            )
        if self.has_router_bias and groups > 1 and E // groups < 2:
            raise UserError(f'a group is ranked by its two best experts; model.expert_groups = {groups} leaves {E // groups} in each')
        if self.first_dense > self.layers:
            raise UserError(f'model.first_dense = {self.first_dense} is more than model.layers = {self.layers}')
        if self.mlp_bias:
            raise UserError('model.mlp_bias: experts have no biases; leave it out, or set model.experts 0')

    @property
    def resolved_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def resolved_head_dim(self) -> int:
        """Dimensions of a query or key."""
        return self.nope_dim + self.rope_dim if self.attention == 'mla' else self.head_dim or self.width // self.heads

    @property
    def value_dim(self) -> int:
        """Dimensions of a value."""
        return self.v_dim if self.attention == 'mla' else self.resolved_head_dim

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a query or key that RoPE turns, the last ones."""
        return self.rope_dim if self.attention == 'mla' else self.resolved_head_dim

    @property
    def resolved_ffn(self) -> int:
        if self.ffn is not None:
            return self.ffn
        return -(-self.width * (8 if self.gated else 12) // 3 // 8) * 8

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def resolved_expert_ffn(self) -> int:
        if self.expert_ffn is not None:
            return self.expert_ffn
        return max(8, self.resolved_ffn // (self.experts_per_token + self.shared_experts) // 8 * 8)

    @property
    def has_router_bias(self) -> bool:
        return self.router == 'sigmoid' if self.router_bias is None else self.router_bias

    @property
    def normalizes_router(self) -> bool:
        return self.router == 'sigmoid' if self.router_normalize is None else self.router_normalize
