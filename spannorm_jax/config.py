"""The configuration: frozen dataclasses, `edit`, JSON and the run id. A config file is a Python function `get() -> Config`."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from spannorm_jax.errors import UserError, nearest
from spannorm_jax.fields import MOST, check_range, check_types, describe, field_types, matches, positive, takes_float
from spannorm_jax.model_config import ModelConfig

ROLES = ('embed', 'read', 'write', 'head', 'gain', 'bias', 'gate', 'mix', 'router', 'router_bias')  # see initializers.py


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes batches of `batch` rows of `seq` tokens."""

    source: str = 'stdlib'
    """stdlib (the running Python's standard library) | a file, folder or glob of text, .jsonl or .parquet (.gz, .zst) | tfds:NAME/CONFIG |
    a folder written by `spannorm prepare`."""
    text_field: str = 'text'
    """Field of a JSONL, Parquet or TFDS record that holds the text."""
    tokenizer: str = 'bytes'
    """bytes | mistral | the path of a SentencePiece .model or a Hugging Face tokenizer.json."""
    seq: int = 128
    """Tokens per row T."""
    batch: int = 8
    """Rows per optimizer step B, over all devices and accumulation steps."""
    workers: int = 0
    """Reader processes; 0 reads in threads of this process. The order of the data does not depend on it."""
    cache: str | None = None
    """Where tokenised copies of raw sources are kept; None means the user's cache folder."""

    def __post_init__(self):
        check_types(self)
        for name in ('seq', 'batch'):
            positive(self, name)
        check_range(self, ('workers',), 0)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer, schedule and loss."""

    optimizer: Literal['adamw', 'muon'] = 'adamw'
    """muon: Muon for the matrices of the blocks, AdamW for everything else."""
    lr_peak: float = 1e-3
    schedule: Literal['cosine', 'wsd', 'linear', 'constant'] = 'cosine'
    warmup_steps: int = 20
    lr_final: float = 0.1
    """Learning rate at the end, as a share of lr_peak (cosine, linear, wsd)."""
    decay_fraction: float = 0.2
    """wsd: share of the steps, at the end, over which the rate falls linearly."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled decay, multiplied by the learning rate, of parameters whose role is in decay_roles."""
    decay_roles: tuple[str, ...] = ('read', 'write', 'head', 'router', 'mix')
    """Gains, biases, embeddings and gates are not decayed by default."""
    clip: float = 1.0
    """Global norm above which gradients are scaled down; 0 never clips."""
    accumulate: int = 1
    """Micro-batches per optimizer step; the gradient is that of the whole batch."""
    z_loss: float = 0.0
    """Weight of the mean squared log-partition of the logits."""
    balance_loss: float = 1e-4
    """Experts: weight of sum_e f_e P_e, f_e = E / K times the share of the tokens that chose e, P_e = its mean score (1 in balance)."""
    router_z_loss: float = 0.0
    """Experts: weight of the mean squared log-partition of the router's logits."""
    router_bias_rate: float = 1e-3
    """Experts: what a step adds to the selection bias of an underloaded expert, and takes from that of an overloaded one."""
    router_bias_until: float = 1.0
    """Experts: share of the steps after which the selection biases stay."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time; None chooses by the size of the logits, 0 never chunks."""
    muon_lr: float | None = None
    """muon: its own peak rate; None means lr_peak (updates are scaled to AdamW's rms)."""

    def __post_init__(self):
        check_types(self)
        positive(self, 'accumulate')
        check_range(self, ('warmup_steps', 'weight_decay', 'clip', 'z_loss', 'eps', 'lr_peak', 'loss_chunk', 'muon_lr'), 0)
        check_range(self, ('balance_loss', 'router_z_loss', 'router_bias_rate'), 0)
        check_range(self, ('lr_final', 'decay_fraction', 'router_bias_until'), 0, 1)
        check_range(self, ('beta1', 'beta2'), 0, 1, open_high=True)
        for role in self.decay_roles:
            if role not in ROLES:
                raise UserError(f'decay_roles holds {role!r}; {nearest(role, ROLES)}')
        if self.muon_lr is not None and self.optimizer != 'muon':
            raise UserError("muon_lr has no effect with optim.optimizer = 'adamw'; leave it out or change the optimizer")


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh."""

    replica: int = 1
    """Copies of the model on different slices of a pod, whose gradients meet over the slow network between them."""
    data: int = -1
    """Copies of the model, each on its own rows; -1 takes the devices that the other axes leave."""
    fsdp: int = 1
    """Shards of parameters and optimizer state, which also split the batch."""
    expert: int = 1
    """Shards of the experts, which also split the batch; tokens travel to their experts and back."""
    sequence: int = 1
    """Shards of each row along its positions (context parallelism): queries stay, keys and values are gathered."""
    tensor: int = 1
    """Shards of heads, FFN hidden units and vocabulary."""
    devices: int | None = None
    """How many devices to use; None means all of them."""
    platform: Literal['auto', 'cpu', 'gpu', 'tpu'] = 'auto'
    """auto takes the best one present; naming one that is absent is an error, never a silent fall-back."""

    def __post_init__(self):
        check_types(self)
        for name in ('replica', 'fsdp', 'expert', 'sequence', 'tensor'):
            positive(self, name)
        if self.data != -1:
            positive(self, 'data')


@dataclass(frozen=True)
class RunConfig:
    """Length, bookkeeping and policies of one run."""

    steps: int = 300
    seed: int = 0
    """Seed of parameters, data order and dropout."""
    log_every: int = 1
    """Steps between rows of metrics.jsonl."""
    stats_every: int = 0
    """Steps between rows with per-layer statistics; 0 never collects them."""
    eval_every: int = 100
    """Steps between held-out evaluations; 0 evaluates only at the end."""
    eval_tokens: int | None = 131_072
    """At most this many tokens of whole documents per evaluation; None means the whole split."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0 saves only at the end and when interrupted."""
    keep: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 keeps none."""
    nonfinite: Literal['stop', 'skip', 'rollback'] = 'stop'
    """When a loss or gradient is not finite: stop; leave that update out; or go back to the last checkpoint and leave its data out."""
    hang_s: float = 1800.0
    """Seconds without a step, or a batch of an evaluation, after which stacks are written and the run ends with exit code 71; 0 never."""
    resume: Literal['auto', 'must'] = 'auto'
    """auto: go on from the newest checkpoint, or begin where there is none; must: that there is none is an error."""
    torn: Literal['stop', 'previous'] = 'stop'
    """When the newest checkpoint is not what its manifest says: stop; or set it aside, and go on from the one before."""
    accept: tuple[str, ...] = ()
    """Dotted names of fields that this start may change though the run goes on as another one (docs/reliability.md)."""
    root: str = 'runs'
    """Folder of the run directories."""
    dir: str | None = None
    """This run's directory; None means <root>/<name>-<hash8>."""
    sinks: tuple[Literal['tensorboard', 'wandb'], ...] = ()
    """Where metrics go besides metrics.jsonl."""

    def __post_init__(self):
        check_types(self)
        positive(self, 'log_every')
        positive(self, 'keep')
        check_range(self, ('steps', 'seed', 'stats_every', 'eval_every', 'checkpoint_every', 'keep_every'), 0)
        check_range(self, ('eval_tokens',), 1)
        check_range(self, ('hang_s',), 0)


@dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    name: str = 'run'
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self):
        check_types(self)
        if not self.name or not all(ch.isalnum() or ch in '._-' for ch in self.name) or self.name.startswith('.'):
            raise UserError(f'name = {self.name!r} must be letters, digits, ".", "_" or "-", and not start with "."')
        if self.optim.optimizer == 'muon' and self.model.parametrization != 'standard':
            raise UserError(f'model.parametrization = {self.model.parametrization!r} is for Adam; use optim.optimizer adamw')
        if self.data.batch % self.optim.accumulate:
            raise UserError(f'optim.accumulate = {self.optim.accumulate} does not divide data.batch = {self.data.batch}')


_DEFAULT = Config()

# Fields that say how a run is computed, watched and kept, not what it computes (up to rounding): they are outside its identity, and
# may change when it goes on.
HOW_NOT_WHAT = {
    'model': ('remat', 'scan_unroll', 'attn_kernel', 'expert_exchange'),
    'data': ('workers', 'cache'),
    'optim': ('loss_chunk',),
    'mesh': ('replica', 'data', 'fsdp', 'expert', 'sequence', 'tensor', 'devices', 'platform'),
    'run': (
        'root',
        'dir',
        'sinks',
        'log_every',
        'stats_every',
        'eval_every',
        'checkpoint_every',
        'keep',
        'keep_every',
        'hang_s',
        'resume',
        'torn',
        'accept',
    ),  # fmt: skip
}


def run_id(cfg: Config) -> str:
    """`<name>-<hash8>`, the hash over every field that can change a number of the run and is not at its default.

    So a field that is added later renames no run; a default that changes is found when config.json, which has every field, is compared.
    """
    told: dict[str, Any] = {'name': cfg.name}
    for section, default in vars(_DEFAULT).items():
        if section != 'name':
            own, outside = vars(getattr(cfg, section)), HOW_NOT_WHAT.get(section, ())
            told[section] = {k: own[k] for k, v in vars(default).items() if k not in outside and own[k] != v}
    text = json.dumps(told, sort_keys=True)
    return f'{cfg.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'


def edit(cfg: Any, changes: dict[str, Any]) -> Any:
    """A copy with dotted fields replaced: `edit(cfg, {'model.layers': 96, 'run.seed': 1})`.

    Raises UserError for a field that does not exist, naming the nearest one.
    """
    new, inner = {}, {}
    for path, value in changes.items():
        head, _, rest = path.partition('.')
        names = [f.name for f in dataclasses.fields(cfg)]
        if head not in names:
            raise UserError(f'{type(cfg).__name__} has no field {head!r}; {nearest(head, names)}')
        if rest:
            inner.setdefault(head, {})[rest] = value
        else:
            new[head] = value
    # All changes of one section at once: what they make together must be valid, not each on the way.
    return dataclasses.replace(cfg, **new, **{head: edit(getattr(cfg, head), rest) for head, rest in inner.items()})


def to_dict(cfg: Any) -> dict[str, Any]:
    """Plain nested dict of a config; tuples become lists, as in JSON."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def from_dict(cls: type, tree: Any, where: str = '') -> Any:
    """The inverse of `to_dict`, strict: unknown fields and wrong types raise UserError with their dotted place."""
    if not isinstance(tree, dict):
        raise UserError(f'{where or cls.__name__}: expected an object, got {type(tree).__name__}')
    hints, names = field_types(cls), [f.name for f in dataclasses.fields(cls)]
    values = {}
    for name, value in tree.items():
        if name not in names:
            raise UserError(f'{cls.__name__} has no field {where + name!r}; {nearest(name, names)}')
        hint = hints[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            values[name] = from_dict(hint, value, f'{where}{name}.')
        else:
            value = tuple(value) if isinstance(value, list) else value
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST and takes_float(hint):
                value = float(value)
            if not matches(value, hint):
                raise UserError(f'{where}{name} = {repr(value)[:80]}: expected {describe(hint)}')
            values[name] = value
    return cls(**values)
