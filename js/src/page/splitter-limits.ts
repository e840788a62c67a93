// Description of a splitter: its name, its direction, and the limits of the size that it controls.

export interface Split {
  name: string; // the key under which the size is stored
  label: string;
  upright: boolean; // the bar is vertical and moves horizontally
  least: number;
  most: number;
  usual: number;
  /** 1: moving it towards the end increases the size; -1: decreases it. */
  sign: 1 | -1;
  set(size: number): void;
}

export const clamped = ({ least, most }: Split, size: number): number => Math.round(Math.min(Math.max(size, least), most));
