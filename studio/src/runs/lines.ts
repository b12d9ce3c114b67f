// What a run's records are as lines of charts.

import type { Run } from '../lib/api'
import type { Line } from '../lib/charts/LineChart.svelte'

/** `of` names the run where a chart shows two, and the second is dashed. */
export function losses(run: Run, of = '', dashed = false): Line[] {
  return [
    { name: `train${of}`, dashed, points: run.records.map(([step, loss]) => [step, loss]) },
    { name: `held out${of}`, dashed, bold: true, points: run.held_out_records },
  ]
}

export function entropies(run: Run, name = 'router', dashed = false): Line[] {
  return [{ name, bold: true, dashed, points: run.records.map(([step, , entropy]) => [step, entropy]) }]
}

export function depths(run: Run, name = 'depth', dashed = false): Line[] {
  return [{ name, bold: true, dashed, stepped: true, points: run.records.map(([step, , , depth]) => [step, depth]) }]
}

const MOST_BANDS = 60

/** Load by block, as means of so many neighbouring steps that the bands can be told apart. */
export function loads(run: Run): { stops: number[]; shares: number[][] } {
  const size = Math.ceil(run.load_history.length / MOST_BANDS)
  const stops: number[] = []
  const shares: number[][] = []
  for (let from = 0; from < run.load_history.length; from += size) {
    const some = run.load_history.slice(from, from + size)
    stops.push(some.at(-1)!.step)
    shares.push(run.colors.map((_, block) => some.reduce((sum, { load }) => sum + (load[block] ?? 0), 0) / some.length))
  }
  return { stops, shares }
}

/** Shares stand in full colour from twice the balanced share on, so that balance is half. */
export function fullShare(run: Run): number {
  return Math.max(2 / run.num_experts, ...run.load.flat())
}

/** The entropy of a router that prefers no block, for each number of blocks. */
export function mostEntropy(...runs: Run[]): { y: number; name: string }[] {
  const numbers = new Set(runs.map((run) => run.num_experts).filter((blocks) => blocks > 0))
  return [...numbers].map((blocks) => ({ y: Math.log(blocks), name: `ln ${blocks}` }))
}
