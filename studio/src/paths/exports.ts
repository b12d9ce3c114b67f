// A forced text as something to run elsewhere: Python, or a command.

import type { Path } from '../lib/api'

export interface Setting {
  text: string
  max_new_tokens: number
  temperature: number
  top_k: number | null
  seed: number
  path: Path
  path_weight: number | null
}

/** As a shell takes it: between single quotes nothing has a meaning. */
const quoted = (text: string) => `'${text.replaceAll("'", `'\\''`)}'`

// Every JSON string is a Python string.
const python = (value: unknown) => (value === null ? 'None' : JSON.stringify(value))

export function asPython(folder: string, setting: Setting): string {
  const given = [
    `    max_new_tokens=${setting.max_new_tokens},`,
    `    temperature=${setting.temperature},`,
    `    top_k=${python(setting.top_k)},`,
    `    seed=${setting.seed},`,
  ]
  if (setting.path !== null) {
    given.push(`    path=${python(setting.path).replaceAll(',', ', ')},`)
    if (setting.path_weight !== null) given.push(`    path_weight=${setting.path_weight},`)
  }
  return [
    'from pathlib import Path',
    '',
    'from lol.generate import generate_text',
    'from lol.train.loading import load_model',
    '',
    `model, tokenizer = load_model(Path(${python(folder)}))`,
    'text = generate_text(',
    '    model,',
    '    tokenizer,',
    `    ${python(setting.text)},`,
    ...given,
    ')',
    'print(text)',
    '',
  ].join('\n')
}

/** The command; `file` is where the path was saved, which it needs when the path says more than one block per depth. */
export function asCommand(folder: string, setting: Setting, file: string | null): string {
  const words = [
    'lol generate',
    `--model ${quoted(folder)}`,
    `--prompt=${quoted(setting.text)}`,
    `--max-new-tokens ${setting.max_new_tokens}`,
    `--temperature ${setting.temperature}`,
    `--top-k ${setting.top_k ?? 'None'}`,
    `--seed ${setting.seed}`,
  ]
  if (setting.path !== null && file !== null) words.push(`--path-file ${quoted(file)}`)
  else if (setting.path !== null) words.push(`--path ${setting.path.join(' ')}`)
  return words.join(' ')
}

/** Whether a command can say the path by itself. */
export const fitsCommand = (setting: Setting) =>
  setting.path === null || (setting.path_weight === null && setting.path.every((row) => typeof row === 'number'))
