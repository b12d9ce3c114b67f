// Asking again and again, but not while nobody looks.

/** Calls `work` now and then `pause(…)` milliseconds after each end of it, while the tab is visible; returns what stops it. */
export function poll(work: () => Promise<void>, pause: () => number): () => void {
  let timer: ReturnType<typeof setTimeout> | undefined
  let working = false
  let stopped = false

  async function turn() {
    clearTimeout(timer)
    if (stopped || working || document.hidden) return
    working = true
    await work()
    working = false
    if (!stopped) timer = setTimeout(turn, pause())
  }

  document.addEventListener('visibilitychange', turn)
  void turn()
  return () => {
    stopped = true
    clearTimeout(timer)
    document.removeEventListener('visibilitychange', turn)
  }
}
