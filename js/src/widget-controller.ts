// Controller of one view of the widget: toolbar, graph, code, details and memory chart, and their messages to and from
// Python (lazyviz/view/widget/widget.py). A message to Python names an action and an id.

import { Announcer, keepingFocus } from "./page/announcer";
import { CodePanel } from "./drawer/code-panel";
import { DetailsPanel } from "./drawer/details-panel";
import { Drawer } from "./drawer/drawer";
import { splitter } from "./page/splitter";
import { html, on, plainButton } from "./page/dom";
import { grouped } from "./page/format";
import { icon } from "./page/icons";
import { deferredPart, whenLoaded } from "./page/load-deferred-bundle";
import { GraphView } from "./graph/graph-view";
import { MemoryChart } from "./memory/memory-chart";
import type { Callback, Model } from "./model/anywidget-model";
import { PlanControls } from "./toolbar/plan-controls";
import type { SaveMenu } from "./toolbar/save-menu";
import { RunControls } from "./toolbar/run-controls";
import { Scene } from "./model/open-groups-and-layout";
import { Search } from "./toolbar/search-box";
import type { Hover } from "./graph/hover";
import type { Breadcrumbs } from "./graph/breadcrumbs";
import type { ComparisonPanel } from "./table/drag-and-drop-comparison";
import type { TableView } from "./table/table-view";
import { Toolbar, type ToolbarAction } from "./toolbar/toolbar";
import type { Alive, Batch, Choices, Details, Failure, Finding, FromPython, Memory, Moment, PlanMessage, Progress, SceneData, Send, State, StatesMessage } from "./model/types";

const ALIVE = "Alive at peak";
const MOST_BOXES = 2000;
const PATIENCE = 120; // milliseconds, so that opening several groups quickly does not request the details of each

export class WidgetController {
  readonly #data: SceneData;
  readonly #scene: Scene;
  readonly #graph: GraphView;
  readonly #details: DetailsPanel;
  readonly #alive: DetailsPanel;
  readonly #drawer: Drawer;
  #resize: (() => void) | undefined;
  readonly #chart: MemoryChart | null;
  readonly #controls: PlanControls | null;
  private memory: Memory | null;
  #batch: Batch | null;
  readonly #toolbar: Toolbar;
  private readonly run: RunControls;
  private save: SaveMenu | null = null;
  #crumbs: Breadcrumbs | null = null;
  #hover: Hover | null = null;
  private readonly search: Search;
  readonly #code: CodePanel;
  #table: TableView | null = null;
  #comparison: ComparisonPanel | null = null;
  readonly #compare = html("span", { "data-python": true });
  readonly #errors = html("div", { class: "lz-errors", "data-panel": "error" });
  readonly #announcer = new Announcer();
  readonly #observer: ResizeObserver;
  readonly #waiting = new Set<string>();
  #selected: string | null = null;
  #moment: number | null = null; // the requested position
  #expanding = false;
  #read: number | undefined; // the position of the chart cursor
  #asked: number | undefined; // the position whose live storages were requested
  #stopped = false;
  #telling: ReturnType<typeof setTimeout> | undefined;
  readonly #listeners: [string, Callback][] = [];

  readonly #model: Model;
  readonly #root: HTMLElement;
  readonly #fetch: () => void; // loads the deferred part

  constructor(
    model: Model,
    root: HTMLElement,
    fetch: () => void,
  ) {
    this.#model = model;
    this.#fetch = fetch;
    this.#root = root;
    this.#data = model.get("scene") as SceneData;
    const { memory, devices } = this.#data;
    this.memory = memory;
    this.#batch = this.#data.batch;
    this.#scene = new Scene(this.#data.root, this.#data.groups, this.#data.opened);
    const ask = this.#send;
    const go = this.#go.bind(this);
    const counted = this.#countFindings.bind(this);
    this.search = this.#makeSearch(go);
    this.run = new RunControls(ask, go, counted);
    this.#details = new DetailsPanel("details", { go, ask });
    this.#alive = new DetailsPanel("alive", { go, ask });
    this.#graph = this.#makeGraph();
    this.#chart = memory ? this.#makeChart(memory) : null;
    this.#controls = memory && devices ? new PlanControls({ batch: this.#batch, device: devices.chosen }, devices, memory, { ask, go, counted }) : null;
    this.#code = new CodePanel(ask);
    const [tableButton, saveButton] = [iconButton("table", "Table", "Table (T)"), iconButton("save", "Save", "Save to a file")];
    saveButton.setAttribute("aria-haspopup", "menu");
    saveButton.setAttribute("aria-expanded", "false");
    tableButton.setAttribute("aria-pressed", "false");
    const syncs = html("div", {});
    this.#toolbar = this.#makeToolbar(tableButton, saveButton, syncs);
    const details = html("div", "lz-details-panel", html("div", "lz-details-head", this.run.upTo), this.#details.element);
    this.#drawer = new Drawer({ error: this.#errors, code: this.#code.element, alive: this.#alive.element, details });
    this.#drawer.element.append(this.#code.first);
    const canvas = html("div", { class: "lz-canvas", "data-part": "canvas" }, this.#graph.element);
    const strip = html("div", { class: "lz-strip", "data-part": "strip" }, ...(this.#chart ? [this.#chart.element] : []));
    this.#arrange(strip, canvas);
    this.#listenToButtons(tableButton, saveButton);
    this.#addLater(canvas, details, tableButton, saveButton, syncs);
    this.#showCode(go);
    if (!this.#scene.boxes.size) canvas.prepend(html("p", "lz-muted lz-empty", "Nothing was recorded: no PyTorch op ran."));
    this.#showPeak(false);
    this.#resize = () => {
      this.#graph.resize(this.#graph.element.clientWidth);
      this.#chart?.resize();
      this.#toolbar.tellFit();
      this.#controls?.tellFit();
    };
    this.#observer = new ResizeObserver(this.#resize);
    this.#observer.observe(canvas);
    this.#observer.observe(strip);
    this.#observer.observe(this.#toolbar.chip); // the elements beside it can change their size
    this.#listenToModel();
    this.#showChoices();
    this.#showState();
    this.#showError();
    this.#countFindings();
    this.#controls?.begin();
    if (memory) ask("track");
  }

  #makeSearch(go: (chain: string[]) => void): Search {
    return new Search({
      ask: this.#send,
      go,
      asked: (query) => {
        this.#table?.search(query);
      },
      light: (ids) => {
        this.#graph.find(ids);
      },
      say: (text) => {
        this.#announcer.say(text);
      },
    });
  }

  #makeGraph(): GraphView {
    const graph = new GraphView(this.#scene, {
      choose: (id, open) => {
        this.#choose(id, open);
      },
      close: (id) => {
        const group = this.#scene.enclosing(id);
        if (group === undefined) this.#clear();
        else this.#choose(group, true);
      },
      clear: () => {
        this.#clear();
      },
      selected: (id) => {
        this.#crumbs?.show(id);
      },
      drawn: () => {
        this.#tellDrawing();
      },
      numbers: (by) => {
        this.#send("numbers", by);
      },
    });
    const { by, notes = [], memory } = this.#data;
    graph.offer(notes);
    if (by && !notes.length) graph.colorBy(by);
    if (memory) graph.measure(memory);
    return graph;
  }

  #makeChart(memory: Memory): MemoryChart {
    return new MemoryChart(memory, {
      peak: () => {
        this.#showPeak(true);
      },
      moment: (position) => {
        this.#moment = position;
        this.#send("moment", String(position));
      },
      range: (start, stop) => {
        this.#send("range", `${start}-${stop}`);
      },
      read: (chain, position) => {
        this.#graph.run(chain ? this.#scene.visible(chain.split(" ")) : null);
        this.#follow(position);
      },
      whole: () => {
        if (this.#selected === null) this.#clear();
      },
    });
  }

  #makeToolbar(table: HTMLButtonElement, save: HTMLButtonElement, syncs: HTMLElement): Toolbar {
    const { run } = this;
    const controls = this.#controls;
    return new Toolbar(
      this.#data.title,
      this.memory,
      this.#batch,
      this.#data.views,
      {
        run: run.element,
        progress: run.progress,
        plan: controls ? [controls.element] : [],
        search: this.search.element,
        table,
        save: html("span", "lz-save", save),
        settings: [["Backend", run.menu], ["Bar shows", this.#graph.legend.menu], ["Note", run.values], ["Compare", this.#compare], ...(controls?.settings ?? [])],
        findings: [run.note, run.findings, ...(controls?.findings ?? []), syncs],
      },
      (action) => {
        this.#act(action);
      },
    );
  }

  /** Adds the parts to the page: the memory chart above the graph, the drawer beside it. */
  #arrange(strip: HTMLElement, canvas: HTMLElement): void {
    const size = (name: string) => (pixels: number): void => {
      this.#root.style.setProperty(`--lz-${name}`, `${pixels}px`);
      this.#resize?.();
    };
    this.#root.append(
      this.#toolbar.element,
      strip,
      splitter({ name: "strip", label: "Height of the memory chart", upright: false, least: 112, most: 320, usual: 112, sign: 1, set: size("strip") }),
      html(
        "div",
        "lz-body",
        canvas,
        splitter({ name: "drawer", label: "Width of the drawer", upright: true, least: 240, most: 640, usual: 320, sign: -1, set: size("drawer") }),
        this.#drawer.element,
      ),
      this.#announcer.element,
    );
    strip.hidden = !this.#chart;
  }

  #showCode(go: (chain: string[]) => void): void {
    const { code } = this.#data;
    this.#code.showLayers(this.memory?.layers ?? [], go);
    if (code) this.#code.show(code);
    else if (code === null) this.#code.refresh();
    const coded = code === null || Boolean(code?.sections?.length);
    this.#drawer.offer("code", coded);
    this.#drawer.show(coded ? "code" : "alive");
    if (!coded) this.#fetch();
  }

  #listenToModel(): void {
    this.#listen("change:state", () => {
      this.#showState();
      this.#controls?.refresh(); // measurements belong to the plan
    });
    for (const name of ["report", "summary"]) {
      this.#listen(`change:${name}`, () => {
        this.#showState();
      });
    }
    this.#listen("change:error", () => {
      this.#showError();
    });
    this.#listen("change:progress", () => {
      const progress = this.#model.get("progress") as Progress | null;
      this.run.showProgress(progress);
      this.#announcer.tellProgress(progress);
    });
    for (const name of ["choices", "findings"]) {
      this.#listen(`change:${name}`, () => {
        this.#showChoices();
      });
    }
    this.#listen("msg:custom", (message) => {
      this.#hear(message);
    });
  }

  stop(): void {
    this.#stopped = true;
    this.#controls?.stop();
    this.#observer.disconnect();
    for (const [event, callback] of this.#listeners) this.#model.off(event, callback);
  }

  /** Handles a key pressed in the widget. */
  key(event: KeyboardEvent): void {
    if (this.run.key(event) || deferredPart()?.press(event, this.#root)) return;
    const typing = event.target instanceof Element && event.target.closest("input, select, textarea");
    const action = typing || event.ctrlKey || event.metaKey || event.altKey ? "" : { f: "fit", c: "collapse-all", t: "table", p: "peak" }[event.key];
    if (action) this.#root.querySelector<HTMLElement>(`[data-action="${action}"]`)?.click();
    if (event.key !== "F3" && (event.key !== "/" || typing)) return;
    event.preventDefault();
    if (event.key === "F3" && this.search.query) this.search.step(event.shiftKey ? -1 : 1);
    else this.search.focus();
  }

  #listen(event: string, callback: Callback): void {
    this.#model.on(event, callback);
    this.#listeners.push([event, callback]);
  }

  readonly #send: Send = (action, id = "") => {
    this.#model.send({ action, id });
  };

  // eslint-disable-next-line max-lines-per-function -- one case for each kind of message
  #hear(message: FromPython): void {
    switch (message.kind) {
      case "groups":
        this.#scene.add(message.groups);
        if (message.more) break;
        this.#opened(message.groups.map((group) => group.id));
        if (message.note) this.#toolbar.showSummary(`${String(this.#model.get("summary"))} · ${message.note}`);
        break;
      case "states":
        this.#showStates(message);
        break;
      case "graphs":
        this.#comparison?.offer(message.token, message.graphs);
        break;
      case "comparison":
        this.#comparison?.show(message);
        break;
      case "numbers":
        this.#graph.annotate(message.notes, message.boxes);
        break;
      case "file":
        this.save?.hear(message);
        break;
      case "refused":
        this.run.refuse(message.note);
        break;
      case "plan":
        if (this.#controls?.show(message) ?? true) this.#showPlan(message);
        break;
      case "largest":
        this.#controls?.showLargest(message);
        break;
      case "alive":
        this.#asked = undefined;
        if (this.#read === undefined) break;
        this.#graph.holding(message.boxes);
        if (this.#read !== message.position) this.#follow(this.#read);
        break;
      case "track":
        this.#chart?.showTrack(message.track);
        this.#graph.showKept(message.kept ?? []);
        break;
      case "range":
        if (!this.#chart?.showRange(message)) break;
        this.#leaveSelection();
        this.#alive.write((writer) => {
          writer.showRange(message);
        });
        this.#showAlive(`Ops ${grouped(message.points.range[0] + 1)} …`);
        this.#light(message.made);
        break;
      case "details":
        if (message.details.id !== this.#selected || this.#moment !== null) break;
        this.#details.write((writer) => {
          writer.show(message.details);
        });
        this.#graph.relate(message.details.relations);
        this.#chart?.mark(message.details.lifetime);
        this.#code.mark(message.details.lines ?? []);
        break;
      case "code":
        this.#code.show(message.code);
        break;
      case "table":
        this.#table?.show(message.table);
        break;
      case "life":
        this.#hover?.hear(message.id, message.lifetime);
        break;
      case "line":
        this.#showLine(message.details, message.lit);
        break;
      case "moment":
        if (message.moment.position !== this.#moment) break;
        this.#showMoment(message.moment);
        break;
      case "reveal":
        this.#scene.add(message.groups);
        this.#reveal(message.chain);
        break;
      case "found":
        this.search.hear(message);
        break;
    }
  }

  /** Updates bars to the chart cursor: one request at a time, always for the newest position. */
  #follow(position?: number): void {
    this.#read = position;
    if (position === undefined) this.#graph.holding(null);
    else if (this.#asked === undefined) {
      this.#asked = position;
      this.#send("alive", String(position));
    }
  }

  /** Handles requested groups. */
  #opened(ids: string[]): void {
    if (this.#expanding) {
      this.#expanding = false;
      this.#scene.openAll(MOST_BOXES);
      this.#graph.draw();
      this.#graph.home();
      return;
    }
    for (const id of ids) {
      if (this.#waiting.delete(id)) this.#scene.turn(id, true);
    }
    this.#graph.draw(this.#selected ?? undefined);
  }

  /** Requests lines and rows again, after a run or for another plan. */
  #refresh(): void {
    this.#code.refresh();
    this.#table?.refresh();
  }

  /** Shows the chosen line of code: highlights its ops, and scrolls the first of them into view. */
  #showLine(details: Details, lit: string[]): void {
    this.#selected = null;
    this.#leaveMoment();
    this.#graph.select(null);
    this.#chart?.mark(details.lifetime);
    this.#details.write((writer) => {
      writer.show(details);
    });
    const drawn = [...new Set(lit.flatMap((id) => [id, this.#scene.drawn(id)]))];
    this.#graph.light(new Map(drawn.map((id) => [id, ""])));
    this.#graph.show(drawn);
    this.#announcer.say(`${details.title}: ${details.facts.map((fact) => fact.join(" ")).join(", ")}`);
  }

  #choose(id: string, open: boolean): void {
    const box = this.#scene.boxes.get(id);
    if (!box) return;
    const close = this.#scene.closable(id);
    const ask = box.group && open && !close && !this.#scene.known(id);
    if (ask) {
      // Requested before the details, because those of a large group take longer.
      this.#waiting.add(id);
      this.#send("open", id);
    }
    this.#select(id, ask ? PATIENCE : 0);
    if (!box.group || !open || ask) return;
    this.#scene.turn(id, !close);
    this.#graph.draw(id);
    this.#graph.focus(id);
    this.#announcer.say(`${box.label} ${close ? "closed" : "opened"}`);
  }

  /** Selects a box; its details are requested after `wait` milliseconds if it is still selected. */
  #select(id: string, wait = 0): void {
    this.#selected = id;
    this.#leaveMoment();
    this.#graph.light(new Map());
    this.#graph.select(id);
    this.#table?.select(id);
    this.#chart?.mark([]);
    const box = this.#scene.boxes.get(id);
    if (box) this.#details.showBox(box);
    this.#drawer.raise("details");
    this.run.select(box ?? null);
    if (!wait) this.#send("select", id);
    else
      setTimeout(() => {
        if (this.#selected === id) this.#send("select", id);
      }, wait);
  }

  #clear(): void {
    this.#leaveSelection();
    this.#leaveMoment();
    this.#showPeak(false);
  }

  #leaveSelection(): void {
    this.#selected = null;
    this.run.select(null);
    this.#graph.light(new Map());
    this.#graph.select(null);
    this.#chart?.mark([]);
    this.#code.mark([]);
    this.#table?.select(null);
  }

  /** Shows the storages alive at a point of the chart: selects its op, or the innermost drawn box around it. */
  #showMoment(moment: Moment): void {
    this.#leaveSelection();
    this.#selected = this.#scene.visible(moment.chain);
    this.#graph.select(this.#selected);
    this.run.select(this.#scene.boxes.get(this.#selected ?? "") ?? null);
    this.#alive.write((writer) => {
      writer.showMoment(moment);
    });
    this.#showAlive(`Alive at op ${grouped(moment.position + 1)}`);
    this.#light(moment.alive);
    if (this.#selected !== null) this.#graph.center(this.#selected);
  }

  #go(chain: string[]): void {
    const last = chain.at(-1);
    if (last === undefined) return;
    const missing = chain.slice(0, -1).some((id) => !this.#scene.known(id));
    if (missing) this.#send("reveal", last);
    else this.#reveal(chain);
  }

  #reveal(chain: string[]): void {
    for (const id of chain.slice(0, -1)) this.#scene.turn(id, true);
    const last = chain.at(-1);
    if (last === undefined) return;
    this.#graph.draw();
    this.#select(last);
    this.#graph.center(last);
  }

  /** Shows a plan with another size or split, or for another device. */
  #showPlan(message: PlanMessage): void {
    const { memory, batch } = message;
    if (memory.verdict !== this.memory?.verdict) this.#announcer.say(memory.verdictText);
    this.memory = memory;
    this.#batch = batch;
    this.#toolbar.showVerdict(memory, batch);
    this.#chart?.show(memory);
    if (message.sizes) this.#scene.tellSizes(message.sizes);
    this.#graph.draw();
    this.#graph.measure(memory, message.held);
    this.#send("track");
    this.#comparison?.end();
    this.#code.showLayers(memory.layers ?? [], (chain) => {
      this.#go(chain);
    });
    if (this.#moment !== null) this.#leaveSelection();
    this.#refresh();
    if (this.#selected === null) {
      this.#moment = null;
      this.#graph.light(new Map());
      this.#alive.write((writer) => {
        writer.showPeak(memory);
      });
      this.#drawer.titleAlive(ALIVE);
    } else this.#send("select", this.#selected); // its sizes and possibly its lifetime have changed

  }

  #showPeak(light: boolean): void {
    const { memory } = this;
    if (!memory) return;
    this.#alive.write((writer) => {
      writer.showPeak(memory);
    });
    this.#drawer.titleAlive(ALIVE);
    if (!light) return;
    this.#drawer.show("alive");
    this.#leaveSelection();
    this.#leaveMoment();
    this.#light(memory.alive);
  }

  #showAlive(title: string): void {
    this.#drawer.titleAlive(title);
    this.#drawer.raise("alive");
  }

  /** Updates the number of findings on the toolbar's badge. */
  #countFindings(open = false): void {
    const listed = [this.run.note, ...this.run.findings.children, ...(this.#controls?.findings ?? [])];
    const told = listed.filter((each) => each.textContent.trim()).length;
    this.#toolbar?.countFindings(told + (this.#data.syncs?.lines.length ? 1 : 0), open);
  }

  #leaveMoment(): void {
    this.#moment = null;
    this.#chart?.forget();
  }

  /** Highlights the boxes that created the storages that are alive. */
  #light(allocations: Alive[]): void {
    const lit = new Map<string, string>();
    for (const alive of allocations) {
      const id = this.#scene.visible(alive.chain);
      if (id !== null && !this.#scene.isOpen(id)) lit.set(id, alive.bytes);
    }
    this.#graph.light(lit);
  }

  #showChoices(): void {
    const choices = this.#model.get("choices") as Choices | undefined;
    if (choices?.backends) this.run.showChoices(choices);
    const findings = (this.#model.get("findings") as Finding[] | undefined) ?? [];
    if (findings.length) this.#fetch();
    this.run.showFindings(findings);
  }

  /** Updates the states of boxes during a run. */
  #showStates({ boxes }: StatesMessage): void {
    for (const [id, [state, seconds, alarm, share]] of Object.entries(boxes)) {
      const box = this.#scene.boxes.get(id);
      if (box) Object.assign(box, { state, seconds, alarm, share });
    }
    this.#graph.tell(Object.keys(boxes));
    this.#table?.states(boxes);
    if (this.#selected !== null && this.#selected in boxes) {
      this.run.select(this.#scene.boxes.get(this.#selected) ?? null);
    }
  }

  #showState(): void {
    const state = this.#model.get("state") as State;
    if (this.#root.dataset["state"] === "running" && state !== "running") {
      this.#refresh();
      if (this.#selected !== null) this.#send("select", this.#selected); // its facts may have changed
    }
    this.#root.dataset["state"] = state;
    keepingFocus(this.#root, () => {
      const choices = this.#model.get("choices") as Choices | undefined;
      this.#toolbar.showState(state, String(this.#model.get("report") ?? ""), this.memory?.count ?? 0, !this.#scene.boxes.size, choices?.begun);
      this.run.showState(state);
      this.#controls?.showState(state);
    });
    this.#announcer.tellState(state, this.#toolbar.words);
    this.#toolbar.showSummary(String(this.#model.get("summary") ?? ""));
  }

  #showError(): void {
    const failure = this.#model.get("error") as Failure | null;
    const failed = failure?.message !== undefined;
    this.#errors.replaceChildren();
    if (failed) {
      this.#fetch();
      whenLoaded(({ failureBlock }) => {
        if (this.#model.get("error") !== failure) return;
        const block = failureBlock(failure, (chain) => {
          this.#go(chain);
        });
        this.#errors.replaceChildren(block);
      });
    }
    this.#toolbar.showError(failed ? failure : null);
    this.#chart?.fail(failed ? failure : null);
    this.#drawer.offer("error", failed, failed && !failure.recording);
    if (failed) this.#drawer.show("error"); // not in a narrow widget, where it would cover the failed op
  }

  #listenToButtons(tableButton: HTMLButtonElement, saveButton: HTMLButtonElement): void {
    on(tableButton, "click", () => {
      whenLoaded(() => {
        this.#table?.turn(!this.#table.shown);
      });
    });
    on(saveButton, "click", () => {
      whenLoaded(() => {
        this.save?.toggle();
      });
    });
    on(saveButton, "keydown", (event) => {
      if (event.key !== "ArrowDown" || saveButton.ariaExpanded === "true") return;
      event.preventDefault();
      event.stopPropagation();
      saveButton.click();
    });
  }

  /**
   * Adds the content of the deferred part: breadcrumbs of the selected box, the table, the save menu, and the list of
   * sync points.
   */
  #addLater(canvas: HTMLElement, details: HTMLElement, tableButton: HTMLButtonElement, saveButton: HTMLButtonElement, syncs: HTMLElement): void {
    whenLoaded(({ Breadcrumbs, Hover, offerHelp, TableView, SaveMenu, ComparisonPanel, syncList, svgText, MARGIN }) => {
      if (this.#stopped) return;
      this.#table = new TableView(tableButton, {
        ask: this.#send,
        choose: (id, line) => {
          this.#send(line ? "line" : "reveal", id);
        },
        turn: (table) => {
          this.#graph.element.hidden = table;
          if (!table && this.#selected !== null) this.#graph.center(this.#selected);
        },
        say: (text) => {
          this.#announcer.say(text);
        },
      });
      this.#crumbs = new Breadcrumbs(this.#scene, {
        go: (chain) => {
          this.#go(chain);
        },
        home: () => {
          this.#graph.home();
        },
      });
      this.#crumbs.show(this.#selected);
      this.#hover = new Hover(this.#graph.svg, this.#graph.readout, this.#scene, {
        ask: this.#send,
        point: (id) => {
          this.#graph.point(id);
        },
        mark: (lifetime) => {
          this.#chart?.preview(lifetime);
        },
      });
      offerHelp(this.#root);
      details.firstElementChild?.prepend(this.#crumbs.element);
      this.#table.search(this.search.query);
      this.#table.select(this.#selected);
      this.#comparison = new ComparisonPanel(this.#root, this.#toolbar.chip, this.#compare, this.#send, (boxes, most) => {
        this.#graph.compare(boxes, most);
      });
      canvas.append(this.#table.element, this.#comparison.element);
      const picture = (): [svg: string, width: number, height: number] => {
        const { width, height } = this.#graph.size;
        const background = getComputedStyle(this.#root).backgroundColor;
        const text = this.#graph.atFullSize(() => svgText(this.#graph.svg, width, height, background));
        return [text, width + 2 * MARGIN, height + 2 * MARGIN];
      };
      this.save = new SaveMenu(saveButton, this.#data.title, picture, this.#send, (text) => {
        this.run.refuse(text);
      });
      syncs.append(
        syncList(this.#data.syncs, (chain) => {
          this.#go(chain);
        }),
      );
    });
  }

  /** Sends the state of the drawing to Python, which saves files of it. */
  #tellDrawing(): void {
    clearTimeout(this.#telling);
    this.#telling = setTimeout(() => {
      const words = [this.#graph.by, ...this.#scene.open].join("\n");
      if (!this.#stopped) this.#send("drawing", words.length > 9900 ? words.slice(0, words.lastIndexOf("\n", 9900)) : words);
    }, 100);
  }

  /** Shows why the deferred part is not available. */
  refuse(why: string): void {
    this.run.refuse(why);
  }

  #act(action: ToolbarAction): void {
    switch (action) {
      case "views":
        this.#send(action);
        break;
      case "fit":
        this.#graph.fit();
        break;
      case "collapse-all":
        this.#scene.collapseAll();
        this.#graph.draw();
        this.#graph.home();
        break;
      case "expand-all":
        this.#expanding = true;
        this.#send("open-all");
        break;
      case "full-screen":
        if (document.fullscreenElement) void document.exitFullscreen();
        else if ("requestFullscreen" in this.#root) void this.#root.requestFullscreen();
        break;
    }
  }
}

function iconButton(action: "table" | "save", label: string, hint: string): HTMLButtonElement {
  return plainButton({ class: "lz-button lz-icon-button lz-toggle", "data-action": action, "aria-label": label, title: hint }, icon(action));
}
