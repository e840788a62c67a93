// One drawing of the widget: toolbar, graph, code, details and memory chart, and what passes between them and Python.
// Python's side is lazyviz/view/widget/widget.py; a message to it names an action and an id.

import { Announcer, keepingFocus } from "./page/announcer";
import { Breadcrumbs } from "./graph/breadcrumbs";
import { CodePanel } from "./drawer/code-panel";
import { DetailsPanel, failureBlock } from "./drawer/details-panel";
import { html } from "./page/dom";
import { GraphView } from "./graph/graph-view";
import { MemoryChart } from "./strip/memory-chart";
import type { Callback, Model } from "./model/model";
import { PlanControls } from "./toolbar/plan-controls";
import { SaveMenu } from "./toolbar/save-menu";
import { MARGIN, svgText } from "./toolbar/save-svg";
import { RunControls } from "./toolbar/run-controls";
import { Scene } from "./model/scene";
import { Search } from "./toolbar/search";
import { TableView } from "./table/table-view";
import { Toolbar, type ToolbarAction } from "./toolbar/toolbar";
import type { Alive, Batch, Choices, Details, Failure, Finding, FromPython, Memory, Moment, PlanMessage, Progress, SceneData, Send, State, StatesMessage } from "./model/types";

const MOST_BOXES = 2000;
const PATIENCE = 120; // milliseconds: who opens group after group is not to wait for the details of each

export class Body {
  private readonly data: SceneData;
  private readonly scene: Scene;
  private readonly graph: GraphView;
  private readonly details: DetailsPanel;
  private readonly chart: MemoryChart | null;
  private readonly controls: PlanControls | null;
  private memory: Memory | null;
  private batch: Batch | null;
  private readonly toolbar: Toolbar;
  private readonly run: RunControls;
  private readonly save: SaveMenu;
  private readonly crumbs: Breadcrumbs;
  private readonly search: Search;
  private readonly code: CodePanel;
  private readonly table: TableView;
  private readonly errors = html("div", { class: "lz-errors" });
  private readonly announcer = new Announcer();
  private readonly observer: ResizeObserver;
  private readonly waiting = new Set<string>();
  private selected: string | null = null;
  private moment: number | null = null; // the position that was asked for
  private expanding = false;
  private readonly listeners: [string, Callback][] = [];

  constructor(
    private readonly model: Model,
    private readonly root: HTMLElement,
  ) {
    this.data = model.get("scene") as SceneData;
    this.scene = new Scene(this.data.root, this.data.groups, this.data.opened);
    const go = (chain: string[]): void => {
      this.go(chain);
    };
    const say = (text: string): void => {
      this.announcer.say(text);
    };
    this.memory = this.data.memory;
    this.batch = this.data.batch;
    this.search = new Search({
      ask: this.send,
      go,
      asked: (query) => {
        this.table.search(query);
      },
      light: (ids) => {
        this.graph.find(ids);
      },
      say,
    });
    this.table = new TableView({
      ask: this.send,
      choose: (id, line) => {
        this.send(line ? "line" : "reveal", id);
      },
      turn: (table) => {
        this.graph.element.hidden = table;
        if (!table && this.selected !== null) this.graph.center(this.selected);
      },
      say,
    });
    this.run = new RunControls(this.send, go);
    this.save = new SaveMenu(
      this.data.title,
      () => this.picture(),
      this.send,
      (text) => {
        this.run.refuse(text);
      },
    );
    const { run, search, save } = this;
    this.toolbar = new Toolbar(this.data.title, this.memory, this.batch, this.data.views, run.element, save.element, search.element, {
      act: (action) => {
        this.act(action);
      },
    });
    this.toolbar.listSyncs(this.data.syncs);
    this.details = new DetailsPanel({ go, ask: this.send });
    this.graph = new GraphView(this.scene, {
      choose: (id, open) => {
        this.choose(id, open);
      },
      close: (id) => {
        const group = this.scene.enclosing(id);
        if (group === undefined) this.clear();
        else this.choose(group, true);
      },
      clear: () => {
        this.clear();
      },
      selected: (id) => {
        this.crumbs.show(id);
      },
    });
    this.toolbar.element.querySelector(".lz-save")?.before(this.graph.legend.menu);
    this.search.element.before(this.table.menu);
    const { memory } = this;
    this.chart = memory
      ? new MemoryChart(memory, {
          peak: () => {
            this.showPeak(true);
          },
          moment: (position) => {
            this.moment = position;
            this.send("moment", String(position));
          },
          range: (start, stop) => {
            this.send("range", `${start}-${stop}`);
          },
          whole: () => {
            if (this.selected === null) this.clear();
          },
        })
      : null;
    const left = html("div", { class: "lz-left" }, this.graph.element, this.table.element);
    if (this.chart) left.append(this.chart.element);
    const { devices } = this.data;
    this.controls =
      memory && devices
        ? new PlanControls({ batch: this.batch, device: devices.chosen }, devices, memory, { ask: this.send, go })
        : null;
    if (this.controls) this.toolbar.element.append(this.controls.element);
    this.toolbar.element.append(run.progress);
    this.code = new CodePanel(this.send);
    const side = html("div", { class: "lz-side" }, this.code.element, this.details.element);
    this.crumbs = new Breadcrumbs(this.scene, {
      go,
      home: () => {
        this.graph.home();
      },
    });
    root.append(this.toolbar.element, this.errors, run.findings, this.crumbs.element, html("div", { class: "lz-body" }, left, side), this.announcer.element);
    if (this.data.code) this.code.show(this.data.code);
    else if (this.data.code === null) this.code.refresh();
    else this.code.element.hidden = true;
    if (!this.scene.boxes.size) left.prepend(html("p", { class: "lz-muted lz-empty" }, "Nothing was recorded: no PyTorch op ran."));
    this.showPeak(false);
    this.observer = new ResizeObserver(() => {
      this.graph.resize(this.graph.element.clientWidth);
      this.chart?.resize(this.chart.element.clientWidth);
    });
    this.observer.observe(left);
    this.listen("change:state", () => {
      this.showState();
      this.controls?.refresh(); // what was measured belongs to the plan
    });
    for (const name of ["report", "summary"]) {
      this.listen(`change:${name}`, () => {
        this.showState();
      });
    }
    this.listen("change:error", () => {
      this.showError();
    });
    this.listen("change:progress", () => {
      const progress = model.get("progress") as Progress | null;
      run.showProgress(progress);
      this.announcer.tellProgress(progress);
    });
    for (const name of ["choices", "findings"]) {
      this.listen(`change:${name}`, () => {
        this.showChoices();
      });
    }
    this.listen("msg:custom", (message) => {
      this.hear(message);
    });
    this.showChoices();
    this.showState();
    this.showError();
    this.controls?.begin();
  }

  stop(): void {
    this.controls?.stop();
    this.observer.disconnect();
    for (const [event, callback] of this.listeners) this.model.off(event, callback);
  }

  /** A key pressed anywhere in the widget. */
  key(event: KeyboardEvent): void {
    if (this.run.key(event)) return;
    const typing = event.target instanceof Element && event.target.closest("input, select, textarea");
    if (event.key !== "F3" && (event.key !== "/" || typing)) return;
    event.preventDefault();
    if (event.key === "F3" && this.search.query) this.search.step(event.shiftKey ? -1 : 1);
    else this.search.focus();
  }

  private listen(event: string, callback: Callback): void {
    this.model.on(event, callback);
    this.listeners.push([event, callback]);
  }

  private readonly send: Send = (action, id = "") => {
    this.model.send({ action, id });
  };

  private hear(message: FromPython): void {
    switch (message.kind) {
      case "groups":
        this.scene.add(message.groups);
        if (message.more) break;
        this.opened(message.groups.map((group) => group.id));
        if (message.note) this.toolbar.showSummary(`${String(this.model.get("summary"))} · ${message.note}`);
        break;
      case "states":
        this.showStates(message);
        break;
      case "file":
        this.save.hear(message);
        break;
      case "refused":
        this.run.refuse(message.note);
        break;
      case "plan":
        if (this.controls?.show(message) ?? true) this.showPlan(message);
        break;
      case "largest":
        this.controls?.showLargest(message);
        break;
      case "range":
        if (!this.chart?.showRange(message)) break;
        this.leaveSelection();
        this.details.showRange(message);
        this.light(message.made);
        break;
      case "details":
        if (message.details.id !== this.selected || this.moment !== null) break;
        this.details.show(message.details);
        this.graph.relate(message.details.relations);
        this.chart?.mark(message.details.lifetime);
        this.code.mark(message.details.lines ?? []);
        break;
      case "code":
        this.code.show(message.code);
        break;
      case "table":
        this.table.show(message.table);
        break;
      case "line":
        this.showLine(message.details, message.lit);
        break;
      case "moment":
        if (message.moment.position !== this.moment) break;
        this.showMoment(message.moment);
        break;
      case "reveal":
        this.scene.add(message.groups);
        this.reveal(message.chain);
        break;
      case "found":
        this.search.hear(message);
        break;
    }
  }

  /** Groups that were asked for have come. */
  private opened(ids: string[]): void {
    if (this.expanding) {
      this.expanding = false;
      this.scene.openAll(MOST_BOXES);
      this.graph.draw();
      this.graph.home();
      return;
    }
    for (const id of ids) {
      if (this.waiting.delete(id)) this.scene.open.add(id);
    }
    this.graph.draw(this.selected ?? undefined);
  }

  /** Lines and rows, after a run or with another plan. */
  private refresh(): void {
    this.code.refresh();
    this.table.refresh();
  }

  /** A line of the code was chosen: its ops light up, and the first of them comes into view. */
  private showLine(details: Details, lit: string[]): void {
    this.selected = null;
    this.leaveMoment();
    this.graph.select(null);
    this.chart?.mark(details.lifetime);
    this.details.show(details);
    this.graph.light(new Map(lit.map((id) => [id, ""])));
    this.graph.show(lit);
    this.announcer.say(`${details.title}: ${details.facts.map((fact) => fact.join(" ")).join(", ")}`);
  }

  private choose(id: string, open: boolean): void {
    const box = this.scene.boxes.get(id);
    if (!box) return;
    const close = this.scene.closable(id);
    const ask = box.group && open && !close && !this.scene.known(id);
    if (ask) {
      // Before its details are asked for: those of a large group take longer.
      this.waiting.add(id);
      this.send("open", id);
    }
    this.select(id, ask ? PATIENCE : 0);
    if (!box.group || !open || ask) return;
    if (close) this.scene.open.delete(id);
    else this.scene.open.add(id);
    this.graph.draw(id);
    this.graph.focus(id);
    this.announcer.say(`${box.label} ${this.scene.open.has(id) ? "opened" : "closed"}`);
  }

  /** Selects a box; its details are asked for after `wait` milliseconds, if it is selected still. */
  private select(id: string, wait = 0): void {
    this.selected = id;
    this.leaveMoment();
    this.graph.light(new Map());
    this.graph.select(id);
    this.table.select(id);
    this.chart?.mark([]);
    const box = this.scene.boxes.get(id);
    if (box) this.details.showBox(box);
    this.run.select(box ?? null);
    if (!wait) this.send("select", id);
    else
      setTimeout(() => {
        if (this.selected === id) this.send("select", id);
      }, wait);
  }

  private clear(): void {
    this.leaveSelection();
    this.leaveMoment();
    this.showPeak(false);
  }

  private leaveSelection(): void {
    this.selected = null;
    this.run.select(null);
    this.graph.light(new Map());
    this.graph.select(null);
    this.chart?.mark([]);
    this.code.mark([]);
    this.table.select(null);
  }

  /** What is alive at a point of the chart: its op is selected, or the nearest box around it that is drawn. */
  private showMoment(moment: Moment): void {
    this.leaveSelection();
    this.selected = this.scene.visible(moment.chain);
    this.graph.select(this.selected);
    this.run.select(this.scene.boxes.get(this.selected ?? "") ?? null);
    this.details.showMoment(moment);
    this.light(moment.alive);
    if (this.selected !== null) this.graph.center(this.selected);
  }

  private go(chain: string[]): void {
    const last = chain.at(-1);
    if (last === undefined) return;
    const missing = chain.slice(0, -1).some((id) => !this.scene.known(id));
    if (missing) this.send("reveal", last);
    else this.reveal(chain);
  }

  private reveal(chain: string[]): void {
    for (const id of chain.slice(0, -1)) this.scene.open.add(id);
    const last = chain.at(-1);
    if (last === undefined) return;
    this.graph.draw();
    this.select(last);
    this.graph.center(last);
  }

  /** A plan of another size, or cut otherwise, was asked for and has come. */
  private showPlan(message: PlanMessage): void {
    const { memory, batch } = message;
    if (memory.verdict !== this.memory?.verdict) this.announcer.say(memory.verdictText);
    const moved = memory.count !== this.memory?.count;
    this.memory = memory;
    this.batch = batch;
    this.toolbar.showVerdict(memory, batch);
    this.chart?.show(memory);
    if (this.moment !== null) this.leaveSelection();
    this.refresh();
    if (batch) this.graph.legend.showNote(batch.size === batch.recorded ? "" : `sizes as recorded, ${batch.recorded.toLocaleString("en")} samples`);
    if (this.selected === null) {
      this.moment = null;
      this.graph.light(new Map());
      this.details.showPeak(memory);
    } else if (moved) {
      this.send("select", this.selected); // its lifetime is told in other positions now
    }
  }

  private showPeak(light: boolean): void {
    const { memory } = this;
    if (!memory) return;
    this.details.showPeak(memory);
    if (!light) return;
    this.leaveSelection();
    this.leaveMoment();
    this.light(memory.alive);
  }

  private leaveMoment(): void {
    this.moment = null;
    this.chart?.forget();
  }

  /** Lights up the boxes that made what is alive. */
  private light(allocations: Alive[]): void {
    const lit = new Map<string, string>();
    for (const alive of allocations) {
      const id = this.scene.visible(alive.chain);
      if (id !== null && this.scene.boxes.get(id)?.kind !== "lane") lit.set(id, alive.bytes);
    }
    this.graph.light(lit);
  }

  private showChoices(): void {
    const choices = this.model.get("choices") as Choices | undefined;
    if (choices?.backends) this.run.showChoices(choices);
    this.run.showFindings((this.model.get("findings") as Finding[] | undefined) ?? []);
  }

  /** Boxes have run, or have begun to. */
  private showStates({ boxes }: StatesMessage): void {
    for (const [id, [state, seconds, alarm]] of Object.entries(boxes)) {
      const box = this.scene.boxes.get(id);
      if (box) Object.assign(box, { state, seconds, alarm });
    }
    this.graph.tell(Object.keys(boxes));
    this.table.states(boxes);
    if (this.selected !== null && this.selected in boxes) {
      this.run.select(this.scene.boxes.get(this.selected) ?? null);
    }
  }

  private showState(): void {
    const state = this.model.get("state") as State;
    if (this.root.dataset["state"] === "running" && state !== "running") {
      this.refresh();
      if (this.selected !== null) this.send("select", this.selected); // it has run
    }
    this.root.dataset["state"] = state;
    keepingFocus(this.root, () => {
      const choices = this.model.get("choices") as Choices | undefined;
      this.toolbar.showState(state, String(this.model.get("report") ?? ""), !this.scene.boxes.size, choices?.begun);
      this.run.showState(state);
      this.controls?.showState(state);
    });
    this.announcer.tellState(state, this.toolbar.words);
    this.toolbar.showSummary(String(this.model.get("summary") ?? ""));
  }

  private showError(): void {
    const failure = this.model.get("error") as Failure | null;
    const block =
      failure?.message !== undefined
        ? [
            failureBlock(failure, (chain) => {
              this.go(chain);
            }),
          ]
        : [];
    this.errors.replaceChildren(...block);
  }

  /** The graph as it is drawn now, and its size. */
  private picture(): [svg: string, width: number, height: number] {
    const { width, height } = this.graph.size;
    const background = getComputedStyle(this.root).backgroundColor;
    const text = this.graph.atFullSize(() => svgText(this.graph.svg, width, height, background));
    return [text, width + 2 * MARGIN, height + 2 * MARGIN];
  }

  private act(action: ToolbarAction): void {
    switch (action) {
      case "views":
        this.send(action);
        break;
      case "fit":
        this.graph.fit();
        break;
      case "collapse-all":
        this.scene.collapseAll();
        this.graph.draw();
        this.graph.home();
        break;
      case "expand-all":
        this.expanding = true;
        this.send("open-all");
        break;
    }
  }
}
