// A text cut at every border of a window, whatever its depth: the tokens of a stretch share a window at each depth, so a path.

import type { Token, Window } from '../lib/api'

export interface Stretch {
  start: number
  end: number
  tokens: Token[]
  /** The window of each depth that holds the stretch; undefined where it is not known yet. */
  windows: (Window | undefined)[]
}

/** Windows of each depth in order; tokens that no window holds yet get stretches of their own. */
export function cutStretches(tokens: Token[], depths: Window[][], from = 0): Stretch[] {
  const borders = new Set([from])
  for (const windows of depths) {
    for (const { start, end } of windows)
      for (const at of [start, end]) if (at > from && at < tokens.length) borders.add(at)
  }
  const starts = [...borders].sort((one, other) => one - other)
  const places = depths.map(() => 0)
  return starts.map((start, index) => {
    const windows = depths.map((own, depth) => {
      while ((own[places[depth]!]?.end ?? Infinity) <= start) places[depth]! += 1
      const found = own[places[depth]!]
      return found !== undefined && found.start <= start ? found : undefined
    })
    const end = starts[index + 1] ?? tokens.length
    return { start, end, tokens: tokens.slice(start, end), windows }
  })
}

export const pathOf = (stretch: Stretch) =>
  stretch.windows.map((window) => window?.expert).filter((block): block is number => block !== undefined)
