// The widget's deferred part, which the first picture does not need. See page/load-deferred-bundle.ts.

export { headTitles } from "./drawer/column-titles";
export { lineWords } from "./drawer/line-summary";
export { failureBlock, Writer } from "./drawer/details";
export { Breadcrumbs } from "./graph/breadcrumbs";
export { neighbor } from "./graph/arrow-keys";
export { Hover } from "./graph/hover";
export { Minimap } from "./graph/minimap";
export { animate } from "./graph/layout-animation";
export { relationLines } from "./graph/relation-lines";
export { offerHelp, press } from "./page/keyboard-shortcuts";
export { dragSplitter } from "./page/splitter-moves";
export { describePoint } from "./memory/describe-point";
export { slice } from "./memory/chart-slice";
export { sweep } from "./memory/playback";
export { ComparisonPanel } from "./table/drag-and-drop-comparison";
export { TableView } from "./table/table-view";
export { blockedList, findingsList } from "./toolbar/warnings-list";
export { SaveMenu } from "./toolbar/save-menu";
export { MARGIN, svgText } from "./toolbar/save-svg";
export { SearchHits } from "./toolbar/search-hits";
export { syncList } from "./toolbar/sync-points-list";
