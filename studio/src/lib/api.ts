// What the server tells and is asked, as typed functions. Depths, windows, blocks and tokens count from 0, ends are exclusive.

export interface Model {
  id: string
  name: string
  /** As it is written after `--model`. */
  folder: string
  num_experts: number
  num_routed_depths: number
  window_size: number | null
  window_stride: number
  core_attention: string
  routing: string
  num_parameters: number
  vocab_size: number
  hidden_size: number
  max_position_embeddings: number
  colors: string[]
}

export interface About {
  version: string
  models: Model[]
  runs: boolean
  results: boolean
  /** The folder of saved paths. */
  paths: string
  limits: { max_text_tokens: number; max_new_tokens: number; queue: number; max_saved_paths: number }
}

/** One block per depth, or per depth one per window; -1 leaves a window to the router, null all of them. */
export type Path = number[] | number[][] | null

export interface Window {
  depth: number
  window: number
  start: number
  end: number
  expert: number
  weight: number
  forced: boolean
  probabilities: number[] | null
  input: { start: number; end: number; windows: number }
}

export interface Token {
  id: number
  text: string
}

export interface Trace {
  tokens: Token[]
  depths: { shift: number; windows: Window[] }[]
}

export interface Candidate extends Token {
  p: number
}

export interface Branch {
  path: Path
  path_weight: number | null
}

export interface GenerateRequest {
  model: string
  text: string
  branches: Branch[]
  max_new_tokens: number
  temperature: number
  top_k: number | null
  top_p: number
  seed: number
  top: number
}

export type GenerateEvent =
  | { type: 'prompt'; branch: number; tokens: number; windows: Window[]; next: Candidate[]; divergence: number | null }
  | {
      type: 'token'
      branch: number
      position: number
      id: number
      text: string
      p: number
      windows: Window[]
      next: Candidate[]
    }
  | { type: 'end'; branch: number; reason: 'stop' | 'length' }
  | { type: 'done' }
  | { type: 'error'; message: string }

export interface Layout {
  depths: { shift: number; windows: [number, number][] }[]
  reach: { start: number }[] | null
  pairs: { core: number; full: number; ratio: number }
}

export interface Point {
  num_experts: number
  stored: number
  active: number
  total: number
  flops_per_token: number
  forward_flops_per_token: number
  cache_bytes: number
  checkpoint_bytes: number
}

export interface DialRequest {
  hidden_size: number
  num_attention_heads: number
  num_prelude_layers: number
  num_coda_layers: number
  num_routed_depths: number
  num_experts: number
  window_size: number
  window_stride: number
  vocab_size: number
  context: number
  dtype: 'float32' | 'bfloat16'
}

export interface Dial {
  points: Point[]
  chosen: Point
  marks: {
    name: string
    num_experts: number
    num_routed_depths: number
    hidden_size: number
    stored: number
    active: number
  }[]
  recipe: { command: string; config: Record<string, unknown> }
}

export interface RunSummary {
  name: string
  status: 'waiting' | 'training' | 'stopped' | 'finished'
  step: number
  steps: number | null
  loss: number | null
  held_out: number | null
  updated: number
  num_experts: number
  num_routed_depths: number
  /** Why its files cannot be read. */
  problem: string | null
}

export interface Run extends RunSummary {
  recipe: string | null
  tokens_per_second: number | null
  seconds_left: number | null
  checkpoints: number[]
  colors: string[]
  facts: [string, string][]
  /** step, loss, router entropy in nats, depth */
  records: [number, number | null, number | null, number | null][]
  held_out_records: [number, number | null][]
  load: number[][]
  load_history: { step: number; load: number[] }[]
}

/** Accuracies in percent. */
export interface ToyRecord {
  model: string
  split: string
  split_number: number
  seed: number
  kind: 'run' | 'discovery'
  trained: number | null
  held_out: number | null
  separation: number | null
}

export interface Experiment {
  name: string
  commands: string[]
  documents: { file: string; markdown: string }[]
  figures: { file: string; caption: string }[]
  records: ToyRecord[] | null
  confusions: { title: string; labels: string[]; columns: string[]; matrix: number[][] }[]
  data: { file: string; json: unknown }[]
}

export interface SavedPath {
  name: string
  model: string
  path: number[] | number[][]
  path_weight: number | null
  note: string
}

/** What the server refused, in its own words. */
export class Refusal extends Error {
  readonly status: number

  constructor(status: number, message: string) {
    super(message)
    this.status = status
  }
}

/** A token comes behind the # of the address, which browsers don't send, and leaves it at once. */
function takeToken(): string | null {
  const given = /^#token=(.*)$/.exec(location.hash)?.[1]
  if (given !== undefined) {
    sessionStorage.setItem('token', given)
    history.replaceState(null, '', location.pathname)
  }
  return sessionStorage.getItem('token')
}

const token = takeToken()

/** Ask the server; a status that is no success throws a `Refusal`. */
export async function ask(address: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers)
  if (token !== null) headers.set('Authorization', `Bearer ${token}`)
  const answer = await fetch(`/api/${address}`, { ...options, headers }).catch((error: Error) => {
    if (error.name === 'AbortError') throw error
    throw new Refusal(0, 'the server does not answer: does lol studio still run?')
  })
  if (answer.status === 401) {
    throw new Refusal(401, 'this server wants its token: open the page with #token=TOKEN at the end of its address')
  }
  if (!answer.ok) {
    const body = (await answer.json().catch(() => null)) as { error?: { message?: string } } | null
    throw new Refusal(answer.status, body?.error?.message ?? `the server answers ${answer.status}`)
  }
  return answer
}

async function get<T>(address: string, signal?: AbortSignal): Promise<T> {
  return (await (await ask(address, { signal })).json()) as T
}

export function send(body: unknown, signal?: AbortSignal, method = 'POST'): RequestInit {
  return { method, signal, body: JSON.stringify(body), headers: { 'Content-Type': 'application/json' } }
}

async function post<T>(address: string, body: unknown, signal?: AbortSignal): Promise<T> {
  return (await (await ask(address, send(body, signal))).json()) as T
}

const inAddress = (name: string) => name.split('/').map(encodeURIComponent).join('/')

export const api = {
  about: () => get<About>('about'),
  model: (id: string) => get<Model>(`model?id=${encodeURIComponent(id)}`),
  trace: (body: { model: string; text: string; path: Path; path_weight: number | null }, signal?: AbortSignal) =>
    post<Trace>('trace', body, signal),
  layout: (
    body: {
      num_tokens: number
      window_size: number
      window_stride: number
      num_depths: number
      token: number | null
    },
    signal?: AbortSignal,
  ) => post<Layout>('layout', body, signal),
  dial: (body: DialRequest, signal?: AbortSignal) => post<Dial>('dial', body, signal),
  runs: () => get<{ runs: RunSummary[] }>('runs'),
  run: (name: string, after?: number) =>
    get<Run>(`runs/${inAddress(name)}${after === undefined ? '' : `?after=${after}`}`),
  results: () => get<{ experiments: { name: string; title: string; files: number }[] }>('results'),
  experiment: (name: string) => get<Experiment>(`results/${inAddress(name)}`),
  /** An address for <img>; only where no token is wanted, else fetch it. */
  figure: (name: string, file: string) => `results/${inAddress(name)}/figures/${encodeURIComponent(file)}`,
  paths: () => get<{ paths: SavedPath[] }>('paths'),
  savePath: (saved: SavedPath, overwrite: boolean) =>
    ask(`paths/${encodeURIComponent(saved.name)}?overwrite=${overwrite}`, send(saved, undefined, 'PUT')),
  deletePath: (name: string) => ask(`paths/${encodeURIComponent(name)}`, { method: 'DELETE' }),
}
