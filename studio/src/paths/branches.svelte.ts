// The continuations that stream in, free and forced side by side, and how they differ.

import type { Candidate, GenerateEvent, GenerateRequest, Token, Window } from '../lib/api'
import { generate } from '../lib/stream'

export interface Branch {
  /** Tokens of the text before the continuation. */
  given: number
  written: (Token & { p: number })[]
  /** By depth; those of the text too. */
  windows: Window[][]
  /** What may follow the text. */
  next: Candidate[]
  /** Nats from the first branch's distribution of the next token to this one's. */
  divergence: number | null
  ended: boolean
}

const empty = (): Branch => ({ given: 0, written: [], windows: [], next: [], divergence: null, ended: false })

export class Branches {
  all: Branch[] = $state([])
  running = $state(false)
  problem: string | null = $state(null)
  /** Milliseconds from asking to the last branch's first token. */
  latency: number | null = $state(null)
  #stop: AbortController | null = null

  /** Ask for continuations; what is under way is left. */
  async start(request: GenerateRequest) {
    this.stop()
    const stop = new AbortController()
    this.#stop = stop
    this.all = request.branches.map(empty)
    this.running = true
    this.problem = this.latency = null
    const asked = performance.now()
    try {
      for await (const event of generate(request, stop.signal)) {
        if (stop.signal.aborted) return
        this.#take(event)
        if (this.latency === null && this.all.every((branch) => branch.written.length > 0)) {
          this.latency = performance.now() - asked
        }
      }
    } catch (error) {
      if (!stop.signal.aborted) this.problem = (error as Error).message
    } finally {
      if (this.#stop === stop) this.running = false
    }
  }

  stop() {
    this.#stop?.abort()
    this.#stop = null
    this.running = false
  }

  clear() {
    this.stop()
    this.all = []
    this.problem = null
  }

  #take(event: GenerateEvent) {
    if (event.type === 'error') this.problem = event.message
    if (event.type === 'error' || event.type === 'done') return
    const branch = this.all[event.branch]
    if (branch === undefined) return
    if (event.type === 'prompt') {
      branch.given = event.tokens
      branch.next = event.next
      branch.divergence = event.divergence
      add(branch, event.windows)
    } else if (event.type === 'token') {
      branch.written.push({ id: event.id, text: event.text, p: event.p })
      add(branch, event.windows)
    } else {
      branch.ended = true
    }
  }
}

function add(branch: Branch, windows: Window[]) {
  for (const window of windows) (branch.windows[window.depth] ??= [])[window.window] = window
}

/** Windows that the router chose in both texts and chose differently. */
export function rerouted(free: Window[][], forced: Window[][]): { one: Window; other: Window }[] {
  return forced.flatMap((windows, depth) =>
    windows.flatMap((other, place) => {
      const one = free[depth]?.[place]
      return one !== undefined && !other.forced && one.expert !== other.expert ? [{ one, other }] : []
    }),
  )
}

/** Where two continuations part, counted in new tokens; null while they agree. */
export function partsAt(one: Branch, other: Branch): number | null {
  const length = Math.min(one.written.length, other.written.length)
  for (let place = 0; place < length; place += 1) {
    if (one.written[place]?.id !== other.written[place]?.id) return place
  }
  return null
}
