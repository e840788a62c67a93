// Types of the messages and data from Python: scene.py and details.py in lazyviz/view/scene, and lazyviz/view/widget.

export type State = "pending" | "running" | "done" | "failed" | "interrupted";
export type Phase = "forward" | "backward" | "optimizer" | "other";
export type Kind = "lane" | "step" | "module" | "op" | "input" | "output" | "sync" | "error";

/** A part of a shape's text, and whether it is a mismatched size. */
export type ShapePart = [text: string, clashes: boolean];

export type BoxState = "pending" | "running" | "done" | "failed" | "partly";

/** The minimum and maximum of a number in a box, and its text. */
export type Span = [least: number, most: number, text: string];

/** A user's annotation: its name, and the minimum and maximum of its numbers, also as text. */
export type Note = [name: string, least: number, most: number, leastText: string, mostText: string];

export interface BoxData {
  id: string;
  kind: Kind;
  label: string;
  sub: string;
  phase: Phase;
  op?: string;
  role?: string;
  group?: number;
  repeats?: number;
  syncs?: number; // number of sync points inside
  calls?: number; // number of calls of one module that are drawn as one box
  name?: string; // full name of a module, beginning with the user's variable
  cls?: string;
  entry?: boolean;
  exit?: boolean;
  layer?: string; // kind of layer, for a module
  size?: [width: number, height: number]; // size of the closed box
  through?: string; // input and output shapes
  params?: string;
  given?: [value: number, shape: ShapePart[]][]; // arguments of a rejected op: value id and shape
  by?: [category: string, bytes: number][]; // categories of the bytes in `held`
  bytes?: number; // allocated by its ops; for a tensor, its size
  held?: number; // the part of `bytes` that is alive at the plan's peak
  dtype?: string;
  module?: string;
  numbers?: Record<string, Span>; // FLOPs, projected seconds, annotations
  state?: BoxState; // default: pending
  seconds?: number | null;
  alarm?: "nan" | "inf" | null;
  share?: number; // fraction of its ops that have run
}

/** `width` grows with the bytes; `values` are the ids of the tensors. */
export type EdgeData = [path: number[], label: string, width?: number, values?: number[]];
/** The number of a box in its group, and the ids of tensors that it reads from, or produces for, boxes outside. */
export type EndData = [box: number, values: number[]];

export interface GroupData {
  id: string;
  boxes: BoxData[];
  row?: boolean;
  layers?: number[][];
  rails?: number[][]; // bends of edges that skip layers, innermost first
  edges?: EdgeData[];
  flip?: boolean;
  reads?: EndData[];
  gives?: EndData[];
}

export interface Alive {
  bytes: string;
  category: string;
  label: string;
  chain: string[];
}

/** A layer, or several equal layers, with the bytes that it holds at the peak. */
export interface Layer extends Alive {
  name?: string; // full name, if the label is shorter
  cls: string;
  through: string;
  line: string;
  share: number; // fraction of the peak
}

/** Points of the memory chart: the positions from `start` to before `stop` in equal parts, each shown by its maximum. */
export interface Points {
  range: [start: number, stop: number];
  at: number[];
  bytes: number[][]; // one list for each category
  ops: string[]; // name of the op at each point
  boxes?: string[]; // ids of the op's box and of the groups around it, outermost first
  held?: (number | null)[]; // measured bytes
  track?: Track | undefined;
}

/** Bytes by category of each box in this graph and in another, and whether only this graph has the box. */
export type Differences = Record<string, [before: [string, number][], after: [string, number][], alone: boolean]>;

/** Bytes of boxes by category. */
export type Held = Record<string, [category: string, bytes: number][]>;

/** Projected seconds at the same points; if unknown, only `words` is set. */
export interface Track {
  text: string;
  words: string;
  title: string;
  seconds: number[];
  bounds: string; // for each point, the first letter of its bound: compute, memory or launch
  phases: string[]; // time of each phase, in the order of Memory.phases
  sums: Partial<Record<Phase, string>>; // total time of all sections of a phase
  keys: string[]; // the bounds that occur
}

export interface Memory {
  track?: Track;
  count: number;
  points: Points;
  categories: { name: string; label: string; peak: number; peakText: string; most: number; mostText: string }[];
  peak: number;
  peakText: string;
  peakAt: number | null;
  peakName: string;
  peakChain: string[];
  eagerText: string;
  otherRun: string; // text about the peak of the kind of run that the plan is not for (eager PyTorch or lazyviz)
  needed: number | null; // including allocator and CUDA context, if that is more than the peak
  neededText: string;
  capacity: number | null;
  capacityText: string;
  device: string;
  recordedOn: string; // the device on which Evaluate runs
  verdict: "fits" | "too-big" | "unknown";
  verdictText: string;
  verdictShort: string;
  verdictTitle: string; // also explains what the needed bytes are for
  alive: Alive[];
  layers?: Layer[]; // the layers that hold most at the peak
  aliveCount: number;
  phases: [Phase, number][];
  titles: Partial<Record<Phase, string>>; // titles of the phases, in the order of their first sections
  pieces: [position: number, name: string][]; // where the pieces of a split run begin
  measured: string; // the measured peak beside the projected one
}

/** The named batch: the planned size, and how Evaluate will run it. */
export interface Batch {
  size: number; // samples in the displayed plan
  recorded: number; // samples that Evaluate runs
  group: number; // sizes are multiples of it
  split: string; // "off", "auto" or a number of pieces
  choices: [value: string, label: string][];
  words: string;
  pieces: number;
  blocked: { label: string; why: string; chain: string[] }[];
  blockedCount: number;
}

/** Activations that one box saves for the backward pass of another. Chains are ids, outermost first. */
export interface Kept {
  from: string[];
  to: string[];
  bytes: number;
  text: string;
}

/** The devices that can be planned for. */
export interface Devices {
  chosen: string;
  version: string; // of the displayed plan
  groups: [title: string, entries: [id: string, label: string][]][];
  note: string;
}

/** The sync points with the ops that they ran; equal sync points share one line. */
export interface Syncs {
  title: string;
  lines: string[];
  chains?: string[][][]; // for each line, the boxes of its sync points
}

export interface SceneData {
  title: string;
  root: string;
  opened: string[];
  groups: GroupData[];
  memory: Memory | null;
  batch: Batch | null;
  devices: Devices | null;
  views: boolean;
  by?: string; // the number that boxes show initially; default: bytes held at the peak
  notes?: Note[]; // the newest last
  code?: CodeMessage | null; // null: too long to send with the scene; it can be requested
  syncs?: Syncs;
}

export interface Source {
  file: string;
  line: number;
  text: string;
}

export interface Link {
  label: string;
  chain: string[];
}

export interface TensorRow {
  name: string;
  shape: string;
  dtype: string;
  bytes: string;
  from?: Link | null;
  readers?: Link[];
  more?: number;
  values?: Values;
}

/** Statistics of a tensor's values, if they were computed; `words` describes the histogram. */
export interface Values {
  facts: [name: string, value: string][];
  bins: number[];
  words: string;
}

export interface Flow extends Link {
  bytes: string;
  out: boolean;
}

/** A relation between the selected box and another one. */
export interface Relation extends Link {
  kind: "producer" | "consumer" | "saved" | "gradient";
  bytes?: number;
}

export interface Details {
  id: string;
  title: string;
  subtitle: string;
  facts: [name: string, value: string][];
  source: Source | null;
  inputs: TensorRow[];
  outputs: TensorRow[];
  forward: Link | null;
  flows: Flow[];
  relations: Relation[];
  lifetime: [start: number, stop: number][];
  lines?: string[]; // ids of its lines of code
  readable?: boolean; // results still exist, so that statistics can be computed
  links?: (Link & { bytes: string })[]; // ops of a line
  more?: number;
}

/** The storages that are alive while one node runs; `line` says where each was created, `keeper` what keeps it alive. */
export interface Moment {
  position: number;
  chain: string[];
  name: string;
  bytes: string;
  source: Source | null;
  categories: [name: string, bytes: string][];
  alive: (Alive & { line: string; keeper: string })[];
  aliveCount: number;
}

export interface Progress {
  done: number;
  total: number;
  seconds: number;
  label: string;
  left?: number | null; // estimated seconds
  memory?: string; // text: bytes held by the run, and the device's memory in use
  piece?: number; // 0: a part that runs only once
  pieces?: number;
}

/** Options of Evaluate. A backend that cannot be used has a reason. */
export interface Choices {
  backend: string;
  backends: [name: string, reason: string][];
  summaries: boolean;
  begun: boolean; // a part of the graph has run
}

/** The first NaN or infinity. */
export interface Finding {
  kind: "nan" | "inf";
  text: string;
  chain: string[];
}

export interface StatesMessage {
  kind: "states";
  boxes: Record<string, [state: BoxState, seconds: number | null, alarm: "nan" | "inf" | null, share: number]>;
}

export interface Failure {
  message: string;
  recording?: boolean; // the error ended the recording
  stopped?: string; // text that says where
  sizes?: string[]; // text: origins of mismatched sizes, and sizes that would match
  source: Source | null;
  chain: string[];
  at?: number; // position of the op that failed; beyond the last op: the error occurred while recording
  words?: string; // label in the chart
}

/** A part of the run: its points, and the storages that are allocated in it. */
export interface Range {
  points: Points;
  track?: Track;
  made: (Alive & { share: number })[];
  madeCount: number;
  madeText: string;
  peakText: string;
  peakName: string;
}

/** The bytes that boxes and edges show for the batch size of a plan. */
export interface Sizes {
  boxes: Record<string, [sub: string, bytes: number]>;
  edges: Record<string, string[]>; // the labels of each group
}

/** Another plan is displayed; `device` is the id of its device. */
export interface PlanMessage {
  kind: "plan";
  memory: Memory;
  held?: Held; // bytes of boxes at the peak
  sizes?: Sizes;
  batch: Batch | null;
  device: string;
  version: string;
  note: string;
}

/** The largest batch that fits; while `searching`, the largest known to fit. `fixed`: other sizes cannot be planned. */
export interface LargestMessage {
  kind: "largest";
  most: number | null;
  searching: boolean;
  fixed: boolean;
  note: string;
}

export interface Hit extends Link {
  sub: string;
}

/** Hits, beginning with number `start`. The first message also has the ids of all hits and of the groups around them. */
export interface Found {
  query: string;
  total: number;
  start: number;
  hits: Hit[];
  lit?: string[];
}

/** Figures of a line of code, without those that are 0. Sizes are bytes. */
export interface LineFact {
  ops?: number;
  bytes?: number;
  called?: number; // ops of other lines that this line called
  held?: number; // bytes alive at the peak
  gradients?: number; // ops of its backward pass, which another line ran
  gradientBytes?: number;
  gradientHeld?: number;
  seconds?: number; // measured
  projected?: number; // seconds
  sync?: string;
  failed?: string;
}

export interface CodeFacts {
  lines: Record<string, LineFact>;
  peak: number;
  elsewhere: number; // bytes at the peak that no line of this code allocated
}

export interface CodeMessage {
  sections?: { label: string; lines: [line: number, text: string][] }[];
  facts: CodeFacts;
}

/** A page of the table; rows are numbered from 0. */
export interface TableData {
  mode: string;
  sort: string; // "": program order
  down: boolean;
  phase: string;
  query: string;
  page: number;
  pages: number;
  total: number;
  first: number;
  columns: [key: string, title: string, number: boolean][];
  rows: { id: string; cells: string[] }[];
}

/** A piece of a file in base64; the last one has no `more`. */
export interface FileMessage {
  kind: "file";
  format: string;
  type: string;
  data: string;
  more: boolean;
  error: string;
}

/** Two plans compared: points of both curves, up to `top` bytes, and rows with both values, the change, and a label. */
export interface Compared {
  names: [string, string];
  peaks: [number, number];
  top: number;
  curves: [number[], number[]];
  rows: string[][];
  lines: string[][];
  boxes: Differences;
  pictures: string[]; // addresses of images
}

export type FromPython =
  | PlanMessage
  | LargestMessage
  | ({ kind: "range" } & Range)
  | { kind: "groups"; groups: GroupData[]; note: string; more?: boolean }
  | { kind: "details"; details: Details }
  | { kind: "code"; code: CodeMessage }
  | { kind: "table"; table: TableData }
  | { kind: "line"; line: string; details: Details; lit: string[] }
  | { kind: "moment"; moment: Moment }
  | { kind: "life"; id: string; lifetime: [start: number, stop: number][] }
  | { kind: "reveal"; groups: GroupData[]; chain: string[] }
  | StatesMessage
  | { kind: "track"; track: Track; kept?: Kept[] }
  | { kind: "alive"; position: number; boxes: Held }
  | { kind: "graphs"; token: string; graphs: [token: string, name: string][] }
  | ({ kind: "comparison" } & Compared)
  | { kind: "numbers"; notes: Note[]; boxes: Record<string, Record<string, Span>> }
  | { kind: "refused"; note: string }
  | { kind: "deferred-part"; code: string }
  | FileMessage
  | ({ kind: "found" } & Found);

export type Action =
  | "deferred-part"
  | "evaluate"
  | "evaluate-to"
  | "backend"
  | "summaries"
  | "export"
  | "summarize"
  | "cancel"
  | "open"
  | "open-all"
  | "select"
  | "moment"
  | "life"
  | "range"
  | "track"
  | "alive"
  | "shown"
  | "device"
  | "largest"
  | "batch-size"
  | "split"
  | "reveal"
  | "search"
  | "search-on"
  | "code"
  | "table"
  | "line"
  | "views"
  | "numbers"
  | "drawing"
  | "graphs"
  | "compare";

/** Sends an action and the id that it refers to, and nothing else. */
export type Send = (action: Action, id?: string) => void;
