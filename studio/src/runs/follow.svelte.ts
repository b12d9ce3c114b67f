// A run as it stands, kept up to date: every second while it trains, every five otherwise.

import { api, type Run } from '../lib/api'
import { poll } from '../lib/poll'

/** More records than charts have pixels for: every second one of the older is then let go. */
const MOST_RECORDS = 4000

export interface Followed {
  readonly run: Run | null
  readonly error: string | null
}

/** To be called while a component is made; stops when it is gone. */
export function follow(name: string): Followed {
  let run = $state.raw<Run | null>(null)
  let error = $state<string | null>(null)

  async function look() {
    try {
      // A held-out loss is written behind the record of its step, so ask from the last of those on.
      const known = run === null ? undefined : (run.held_out_records.at(-1)?.[0] ?? 0)
      const newest = await api.run(name, known)
      // A run that begins again at a lower step is another run.
      run =
        run !== null && newest.step >= run.step
          ? joined(run, newest)
          : known === undefined
            ? newest
            : await api.run(name)
      error = null
    } catch (refused) {
      error = refused instanceof Error ? refused.message : String(refused)
    }
  }

  $effect(() => poll(look, () => (run?.status === 'training' || run?.status === 'waiting' ? 1000 : 5000)))

  return {
    get run() {
      return run
    },
    get error() {
      return error
    },
  }
}

/** What came behind the last step that is known. */
function behind<T extends [number, ...unknown[]]>(known: T[], newest: T[]): T[] {
  const last = known.at(-1)?.[0] ?? -1
  return [...known, ...newest.filter(([step]) => step > last)]
}

function joined(known: Run, newest: Run): Run {
  const all = behind(known.records, newest.records)
  const half = all.length >> 1
  const records = all.length > MOST_RECORDS ? all.filter((_, at) => at > half || at % 2 === 0) : all
  return { ...newest, records, held_out_records: behind(known.held_out_records, newest.held_out_records) }
}
