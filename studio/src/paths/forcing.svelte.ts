// What is forced, and what it was before: every change is a new state, so undo is a step back.

import type { Path, Trace, Window } from '../lib/api'

export const FREE = -1

interface Forced {
  /** A block per depth for every window, those of the continuation too; -1 leaves a depth to the router. */
  depths: number[]
  /** Blocks of single windows, by `key`; they win over `depths`. */
  windows: Record<string, number>
}

export const key = (depth: number, window: number) => `${depth}:${window}`

/** So many blocks a row of a path has that says what all windows of a text of so many tokens run. */
export function rowLength(trace: Trace, depth: number, tokens: number, size: number | null): number {
  const shift = trace.depths[depth]?.shift ?? 0
  // A row of one entry would hold for all windows.
  return Math.max(2, size === null ? 1 : Math.ceil((tokens + shift) / size))
}

export class Forcing {
  #states: Forced[] = $state.raw([])
  #at = $state(0)

  constructor(numDepths: number) {
    this.#states = [{ depths: new Array<number>(numDepths).fill(FREE), windows: {} }]
  }

  get #now(): Forced {
    const now = this.#states[this.#at]
    if (now === undefined) throw new Error('no such state')
    return now
  }

  get canUndo() {
    return this.#at > 0
  }

  get canRedo() {
    return this.#at < this.#states.length - 1
  }

  get isFree() {
    return this.#now.depths.every((block) => block === FREE) && Object.keys(this.#now.windows).length === 0
  }

  /** The whole path, as typed. */
  get depths() {
    return this.#now.depths
  }

  /** The block that a window has to run; -1 where the router decides. */
  blockOf(depth: number, window: number): number {
    return this.#now.windows[key(depth, window)] ?? this.#now.depths[depth] ?? FREE
  }

  undo() {
    if (this.canUndo) this.#at -= 1
  }

  redo() {
    if (this.canRedo) this.#at += 1
  }

  #change(next: Forced) {
    this.#states = [...this.#states.slice(0, this.#at + 1), next]
    this.#at += 1
  }

  /** Make windows run a block; -1 gives them back to the router. */
  force(windows: Iterable<Window>, block: number) {
    const changed = { ...this.#now.windows }
    for (const { depth, window } of windows) {
      if (block === (this.#now.depths[depth] ?? FREE)) delete changed[key(depth, window)]
      else changed[key(depth, window)] = block
    }
    this.#change({ depths: this.#now.depths, windows: changed })
  }

  /** Make all windows of every depth run a block. */
  forceDepths(depths: number[]) {
    this.#change({ depths, windows: {} })
  }

  /** Take a path as a file has it; rows of a depth's full length say what all of its windows run. */
  take(path: number[] | number[][], fullLength: (depth: number) => number) {
    const isWhole = path.every((row) => typeof row === 'number' || row.length === 1)
    if (isWhole) return this.forceDepths(path.map((row) => (typeof row === 'number' ? row : (row[0] ?? FREE))))
    const rows = path as number[][]
    const depths = rows.map((row, depth) => (row.length >= fullLength(depth) ? (row.at(-1) ?? FREE) : FREE))
    const windows: Record<string, number> = {}
    for (const [depth, row] of rows.entries()) {
      for (const [window, block] of row.entries()) if (block !== depths[depth]) windows[key(depth, window)] = block
    }
    this.#change({ depths, windows })
  }

  clear() {
    this.#change({ depths: this.#now.depths.map(() => FREE), windows: {} })
  }

  /** The path as the server takes it, for a text that grows to so many tokens. */
  path(trace: Trace, tokens: number, windowSize: number | null): Path {
    if (this.isFree) return null
    const single = Object.keys(this.#now.windows)
    if (single.length === 0) return this.#now.depths
    return this.#now.depths.map((block, depth) => {
      const count = rowLength(trace, depth, tokens, windowSize)
      const row = Array.from({ length: count }, (_, window) => this.#now.windows[key(depth, window)] ?? block)
      if (block !== FREE) return row
      const last = row.findLastIndex((forced) => forced !== FREE)
      return row.slice(0, Math.max(2, last + 1))
    })
  }
}

/** "0 1 - 3" → [0, 1, -1, 3], or what is wrong with it, in words. */
export function readPath(written: string, numDepths: number, numExperts: number): number[] | string {
  const words = written
    .trim()
    .split(/[\s,]+/)
    .filter(Boolean)
  const blocks = words.map((word) => (word === '-' || word === '-1' ? FREE : /^\d+$/.test(word) ? Number(word) : NaN))
  if (blocks.length !== numDepths) return `${numDepths} blocks, one per depth: there are ${blocks.length}`
  const wrong = words.find((_, place) => !(blocks[place]! >= FREE && blocks[place]! < numExperts))
  return wrong === undefined ? blocks : `${wrong} is no block: 0 to ${numExperts - 1}, or - for the router's choice`
}

export const writePath = (blocks: number[]) => blocks.map((block) => (block === FREE ? '-' : block)).join(' ')
