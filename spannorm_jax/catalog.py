"""The table of topologies as data and as Markdown. Norm sites and parameters are read off a model that is traced, not written down."""

from typing import Any

from spannorm_jax.config import ModelConfig
from spannorm_jax.model import each_param, infos
from spannorm_jax.topology import TOPOLOGIES

SITES = ('attn_in', 'q', 'k', 'v', 'attn_inner', 'attn_branch', 'attn_sum', 'ffn_in', 'ffn_inner', 'ffn_branch', 'ffn_sum')
EXITS = ('embed', 'final')
SHARED = ('embed', 'head')  # parameters outside the blocks that every topology has


def norm_sites_and_parameters(cfg: ModelConfig) -> tuple[list[str], list[str]]:
    """Sites of all norms, in the order of the block, and names of the parameters that are neither a norm's nor a sublayer's matrix."""
    sites, own = set(), set()
    for name, _, _ in each_param(cfg, infos(cfg)):
        *module, leaf = name.split('.')
        if module and module[-1].startswith('norm_'):
            site = module[-1].removeprefix('norm_')
            sites.add(f'{module[0]}_{site}' if site == 'inner' else site)
        elif not module and leaf not in SHARED:
            own.add(leaf)
    others = sorted(sites.difference(SITES, EXITS))
    return [s for s in (*SITES, *others, *EXITS) if s in sites], sorted(own)


def rows() -> list[dict[str, Any]]:
    """One row per topology, with its default options: name, aliases, equation, source, norm_sites, extra_parameters, options."""
    table = []
    for name, entry in TOPOLOGIES.items():
        # Eight blocks: enough for every plan to show each kind of block it has.
        sites, own = norm_sites_and_parameters(ModelConfig(topology=name, layers=8, width=8, heads=2, vocab=8))
        table.append(
            {
                'name': name,
                'aliases': list(entry.aliases),
                'equation': entry.equation,
                'source': entry.source,
                'norm_sites': sites,
                'extra_parameters': own,
                'options': list(entry.options),
            }
        )
    return table


def markdown(table: list[dict[str, Any]]) -> str:
    """The table of the README."""
    lines = ['| name | block | norms | source |', '|---|---|---|---|']
    for row in table:
        link = row['source'].split()[0].removeprefix('arXiv:')
        source = f'[{row["source"]}](https://arxiv.org/abs/{link})'
        own = ' + own parameters' if row['extra_parameters'] else ''
        lines.append(f'| `{row["name"]}` | `{row["equation"]}` | {", ".join(row["norm_sites"])}{own} | {source} |')
    return '\n'.join(lines)


def names_markdown(table: list[dict[str, Any]]) -> str:
    """The table of docs/topologies.md: what else a topology is called, and what it has that others do not."""
    lines = ['| name | also called | options | parameters of its own |', '|---|---|---|---|']
    for row in table:
        cells = (', '.join(f'`{word}`' for word in row[key]) for key in ('aliases', 'options', 'extra_parameters'))
        lines.append(f'| `{row["name"]}` | {" | ".join(cells)} |')
    return '\n'.join(lines)
