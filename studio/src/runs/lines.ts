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

/** Shares stand in full colour from twice the balanced share on, so that balance is half. */
export function fullShare(run: Run): number {
  return Math.max(2 / run.num_experts, ...run.load.flat())
}
