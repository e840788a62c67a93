// What Python sends.  lazyviz/view/scene/scene.py, details.py and widget.py are the other side of this contract.

export type State = "pending" | "running" | "done" | "failed" | "interrupted";
export type Phase = "forward" | "backward" | "optimizer" | "other";
export type Kind = "lane" | "step" | "module" | "op" | "input" | "output" | "sync" | "error";

/** A part of a shape's text, and whether it is a size that does not fit. */
export type ShapePart = [text: string, clashes: boolean];

export type BoxState = "pending" | "running" | "done" | "failed" | "partly";

/** The least and the most of a number in a box, and these in words. */
export type Span = [least: number, most: number, text: string];

/** An annotation of the user's: its name, and the least and the most of all its numbers. */
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
  syncs?: number; // inside
  calls?: number; // of one module, drawn as one
  name?: string; // of a module, from the user's variable on
  cls?: string;
  entry?: boolean;
  exit?: boolean;
  layer?: string; // kind of layer, of a module
  size?: [width: number, height: number]; // of the closed box
  through?: string; // shapes in and out
  params?: string;
  given?: [value: number, shape: ShapePart[]][]; // to an op that was refused
  by?: [category: string, bytes: number][]; // of held
  bytes?: number; // what its ops allocate; of a tensor its size
  held?: number; // of those, alive at the plan's peak
  dtype?: string;
  module?: string;
  numbers?: Record<string, Span>; // FLOPs, projected seconds, annotations
  state?: BoxState; // pending, if it is left out
  seconds?: number | null;
  alarm?: "nan" | "inf" | null;
  share?: number; // of its ops that have run
}

/** `width` by the bytes, `values` the ids of the tensors. */
export type EdgeData = [path: number[], label: string, width?: number, values?: number[]];
/** A box of a group, by its number, and the ids of tensors that it reads from outside, or makes for outside. */
export type EndData = [box: number, values: number[]];

export interface GroupData {
  id: string;
  boxes: BoxData[];
  row?: boolean;
  layers?: number[][];
  rails?: number[][]; // bends of what skips layers, inmost first
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

/** A layer, or several alike, with what it holds at the peak. */
export interface Layer extends Alive {
  name?: string; // in full, where the label is shorter
  cls: string;
  through: string;
  line: string;
  share: number; // of the peak
}

/** Points of the memory chart: each the highest of its share of the positions from `start` to before `stop`. */
export interface Points {
  range: [start: number, stop: number];
  at: number[];
  bytes: number[][]; // of each category
  ops: string[]; // what runs there
  boxes?: string[]; // its box, after those around it
  held?: (number | null)[]; // what was measured
  track?: Track | undefined;
}

/** Bytes of boxes by category in one graph and in another, and whether they are in the one alone. */
export type Differences = Record<string, [before: [string, number][], after: [string, number][], alone: boolean]>;

/** Bytes of boxes by category. */
export type Held = Record<string, [category: string, bytes: number][]>;

/** Projected seconds of the same points; `words` alone where nothing is known. */
export interface Track {
  text: string;
  words: string;
  title: string;
  seconds: number[];
  bounds: string; // of each point the first letter of what bounds it: compute, memory or launch
  phases: string[]; // of each of the memory's
  keys: string[]; // what bounds some of it
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
  otherRun: string; // the peak of the run that the plan is not of, in words
  needed: number | null; // with the allocator and the CUDA context, where that is more than the peak
  neededText: string;
  capacity: number | null;
  capacityText: string;
  device: string;
  recordedOn: string; // the device on which Evaluate runs
  verdict: "fits" | "too-big" | "unknown";
  verdictText: string;
  verdictShort: string;
  verdictTitle: string; // with what the needed bytes are for
  alive: Alive[];
  layers?: Layer[]; // that hold most at the peak
  aliveCount: number;
  phases: [Phase, number][];
  pieces: [position: number, name: string][]; // where the pieces of a split run begin
  measured: string; // the measured peak beside the projected one
}

/** The batch that was named: what is planned, and what Evaluate is to do about it. */
export interface Batch {
  size: number; // samples of the plan that is shown
  recorded: number; // samples that Evaluate runs
  group: number; // sizes are multiples of it
  split: string; // "off", "auto" or a number of pieces
  choices: [value: string, label: string][];
  words: string;
  pieces: number;
  blocked: { label: string; why: string; chain: string[] }[];
  blockedCount: number;
}

/** What one box keeps for the backward pass, and for which: chains of ids, outermost first. */
export interface Kept {
  from: string[];
  to: string[];
  bytes: number;
  text: string;
}

/** The devices that can be planned for. */
export interface Devices {
  chosen: string;
  version: string; // of the plan that is shown
  groups: [title: string, entries: [id: string, label: string][]][];
  note: string;
}

/** The sync points, equal ones as one line, with what they ran. */
export interface Syncs {
  title: string;
  lines: string[];
  chains?: string[][][]; // of each line's sync points
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
  by?: string; // what boxes show at first, if not what they hold at the peak
  notes?: Note[]; // the newest last
  code?: CodeMessage | null; // null: long, to be asked for
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

/** What a tensor's values are, once they were looked at; `words` tell the histogram. */
export interface Values {
  facts: [name: string, value: string][];
  bins: number[];
  words: string;
}

export interface Flow extends Link {
  bytes: string;
  out: boolean;
}

/** What the selected box has to do with another. */
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
  lines?: string[]; // of the code, by id
  readable?: boolean; // results that are still there can be summarized
  links?: (Link & { bytes: string })[]; // ops of a line
  more?: number;
}

/** What is alive during one node; `line` and `keeper` say where it was made and what keeps it. */
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
  left?: number | null; // seconds, as far as can be foreseen
  memory?: string; // what the run holds, and the device's memory in use
  piece?: number; // 0 in what runs once
  pieces?: number;
}

/** How Evaluate is to run the graph; a backend with a reason cannot. */
export interface Choices {
  backend: string;
  backends: [name: string, reason: string][];
  summaries: boolean;
  begun: boolean; // some of the graph has run
}

/** The first values that went wrong, of one kind. */
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
  recording?: boolean; // it ended the recording
  stopped?: string; // where, in words
  sizes?: string[]; // where sizes that do not fit are from, and what would
  source: Source | null;
  chain: string[];
  at?: number; // position of the op that failed; after the last one: while recording
  words?: string; // for the chart
}

/** A part of the run: its points, and what is made there. */
export interface Range {
  points: Points;
  track?: Track;
  made: (Alive & { share: number })[];
  madeCount: number;
  madeText: string;
  peakText: string;
  peakName: string;
}

/** What boxes and edges say of bytes for the batch of a plan. */
export interface Sizes {
  boxes: Record<string, [sub: string, bytes: number]>;
  edges: Record<string, string[]>; // the labels of each group
}

/** Another plan is shown; `device` is the id of the one that it is for. */
export interface PlanMessage {
  kind: "plan";
  memory: Memory;
  held?: Held; // of boxes at the peak
  sizes?: Sizes;
  batch: Batch | null;
  device: string;
  version: string;
  note: string;
}

/** The largest batch that fits, or while `searching` what is known to fit; `fixed`: other sizes are not known. */
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

/** Hits from number `start` on; with the first of them, the ids of all and of the groups around them. */
export interface Found {
  query: string;
  total: number;
  start: number;
  hits: Hit[];
  lit?: string[];
}

/** What is known of a line of the code; what is 0 is left out.  Sizes are bytes. */
export interface LineFact {
  ops?: number;
  bytes?: number;
  called?: number; // ops of other lines that this one called
  held?: number; // alive at the peak
  gradients?: number; // ops of the backward pass that another line ran
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
  elsewhere: number; // of the peak, what no line made
}

export interface CodeMessage {
  sections?: { label: string; lines: [line: number, text: string][] }[];
  facts: CodeFacts;
}

/** A page of the table; the numbers of rows count from 0. */
export interface TableData {
  mode: string;
  sort: string; // "": in the order of the program
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

/** Two plans beside one another: points of both curves up to `top` bytes, and rows of both, the change and what it is of. */
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

/** Sends an action with the id it is about; never anything else. */
export type Send = (action: Action, id?: string) => void;
