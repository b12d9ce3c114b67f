// The article's numbers, where a document has a table with the columns "model" and "article", as in
// "25.5 (13.9-33.8; round one 9.8)": mean, lowest, highest.

import { plainText, type Block } from './markdown'

export interface Published {
  mean: number
  low: number
  high: number
}

const NUMBERS = /^([\d.]+)(?: \(([\d.]+)-([\d.]+))?/

/** By model, the first table that names it. */
export function publishedOf(documents: { blocks: Block[] }[]): Map<string, Published> {
  const found = new Map<string, Published>()
  for (const block of documents.flatMap(({ blocks }) => blocks)) {
    if (block.kind !== 'table') continue
    const head = block.head.map(plainText)
    const [model, article] = [head.indexOf('model'), head.indexOf('article')]
    if (model === -1 || article === -1) continue
    for (const row of block.rows) {
      const name = plainText(row[model] ?? [])
      const numbers = NUMBERS.exec(plainText(row[article] ?? []))
      if (numbers === null || found.has(name)) continue
      const mean = Number(numbers[1])
      found.set(name, { mean, low: Number(numbers[2] ?? mean), high: Number(numbers[3] ?? mean) })
    }
  }
  return found
}
