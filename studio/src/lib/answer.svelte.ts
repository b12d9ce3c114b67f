// The server's answer to a question that changes while someone drags a slider: asked once the question has rested, and the
// newest answer wins.

export interface Answer<A> {
  /** The newest answer; it stays while the next one is awaited, and goes where that is refused. */
  readonly value: A | null
  readonly error: string | null
  readonly waiting: boolean
}

/** To be called while a component is made. A question of null is not asked. */
export function answer<Q, A>(
  question: () => Q | null,
  ask: (question: Q, signal: AbortSignal) => Promise<A>,
  rest = 80,
): Answer<A> {
  let value = $state.raw<A | null>(null)
  let error = $state<string | null>(null)
  let waiting = $state(false)

  $effect(() => {
    const asked = question()
    waiting = asked !== null
    if (asked === null) return
    const leaving = new AbortController()
    const timer = setTimeout(async () => {
      try {
        const newest = await ask(asked, leaving.signal)
        if (leaving.signal.aborted) return
        value = newest
        error = null
      } catch (refused) {
        if (leaving.signal.aborted) return
        error = refused instanceof Error ? refused.message : String(refused)
        value = null
      }
      waiting = false
    }, rest)
    return () => {
      clearTimeout(timer)
      leaving.abort()
    }
  })

  return {
    get value() {
      return value
    },
    get error() {
      return error
    },
    get waiting() {
      return waiting
    },
  }
}
