// Which windows are chosen: a click takes one, a drag or Shift all between two.

import type { Trace, Window } from '../lib/api'
import { key } from './forcing.svelte'

export class Selection {
  #anchor: Window | null = $state.raw(null)
  #head: Window | null = $state.raw(null)
  keys: Set<string> = $state.raw(new Set())

  get head() {
    return this.#head
  }

  get isEmpty() {
    return this.keys.size === 0
  }

  begin(window: Window) {
    this.#anchor = this.#head = window
    this.keys = new Set([key(window.depth, window.window)])
  }

  /** All windows of the depths between, that hold tokens between. */
  extend(window: Window, trace: Trace) {
    if (this.#anchor === null) return this.begin(window)
    this.#head = window
    const [one, other] = [this.#anchor, window]
    const [first, last] = [Math.min(one.depth, other.depth), Math.max(one.depth, other.depth)]
    const [start, end] = [Math.min(one.start, other.start), Math.max(one.end, other.end)]
    const chosen = trace.depths
      .slice(first, last + 1)
      .flatMap(({ windows }) => windows.filter((own) => own.start < end && own.end > start))
    this.keys = new Set(chosen.map((own) => key(own.depth, own.window)))
  }

  clear() {
    this.#anchor = this.#head = null
    this.keys = new Set()
  }

  has(window: Window) {
    return this.keys.has(key(window.depth, window.window))
  }

  /** Of a trace, the windows that are chosen. */
  in(trace: Trace): Window[] {
    return trace.depths.flatMap(({ windows }) => windows.filter((window) => this.has(window)))
  }
}
