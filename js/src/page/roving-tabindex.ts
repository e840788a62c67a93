// Roving tabindex: Tab reaches one of many buttons, and arrow keys the others.

/** Makes the buttons inside `container` one Tab stop; `bring` scrolls to the one that gets the focus. */
export function roving(container: HTMLElement, bring: (button: HTMLElement) => void): (to: HTMLElement) => void {
  const enter = (to: HTMLElement): void => {
    for (const each of container.querySelectorAll<HTMLElement>("button[tabindex='0']")) each.tabIndex = -1;
    to.tabIndex = 0;
  };
  container.addEventListener("keydown", (event) => {
    const all = [...container.querySelectorAll<HTMLElement>("button[tabindex]")];
    const at = all.indexOf(event.target as HTMLElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const next = all[to];
    if (!next) return;
    enter(next);
    next.focus({ preventScroll: true });
    bring(next);
  });
  container.addEventListener("focusin", (event) => {
    if (event.target instanceof HTMLElement && event.target.hasAttribute("tabindex")) enter(event.target);
  });
  return enter;
}
