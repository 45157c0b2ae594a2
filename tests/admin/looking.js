// What is wrong to see of the element that `arguments[0]` selects, or of the page: a list of complaints. The body of a
// function that looking.py runs in the page.
"use strict";
const top = arguments[0] ? document.querySelector(arguments[0]) : document.body;
const found = [];
const round = (box) => [box.left, box.top, box.right, box.bottom].map(Math.round).join(" ");
const nameOf = (node) => `${node.tagName.toLowerCase()}${node.id ? "#" + node.id : ""} "${node.textContent.trim().slice(0, 30)}"`;

function clipped(box, element) {
  let { left, top, right, bottom } = box;
  for (let up = element; up && up !== document.documentElement; up = up.parentElement) {
    const style = getComputedStyle(up);
    if (style.overflowX === "visible") continue;
    const edge = up.getBoundingClientRect();
    left = Math.max(left, edge.left); right = Math.min(right, edge.right);
    top = Math.max(top, edge.top); bottom = Math.min(bottom, edge.bottom);
  }
  return { left, top, right, bottom };
}

function hidden(element) {
  if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) return true;
  for (let up = element; up; up = up.parentElement) if (getComputedStyle(up).clipPath !== "none") return true;
  return element.closest(".skip, dialog:not([open])") !== null;
}

// Pieces of text, line by line, and controls.
const boxes = [];
const walk = document.createTreeWalker(top, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const text = walk.currentNode, element = text.parentElement;
  if (!text.data.trim() || element.closest("script, style, option") || hidden(element)) continue;
  const range = document.createRange();
  range.selectNodeContents(text);
  for (const each of range.getClientRects()) boxes.push({ element, box: clipped(each, element) });
}
for (const element of top.querySelectorAll("button, input, select"))
  if (!hidden(element)) boxes.push({ element, box: clipped(element.getBoundingClientRect(), element.parentElement) });
const real = boxes.filter(({ box }) => box.right - box.left > 1 && box.bottom - box.top > 1);
if (real.length < 3) found.push("nothing is to be seen");

// What is fixed lies above others on purpose.
function floats(element) {
  for (let up = element; up && up !== top; up = up.parentElement) if (getComputedStyle(up).position === "fixed") return true;
  return false;
}
const still = real.filter(({ element }) => !floats(element));
for (let a = 0; a < still.length; a += 1) for (let b = a + 1; b < still.length; b += 1) {
  const [one, other] = [still[a], still[b]];
  if (one.element.contains(other.element) || other.element.contains(one.element)) continue;
  const wide = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
  const high = Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top);
  if (wide > 1.5 && high > 2.5)
    found.push(`${nameOf(one.element)} [${round(one.box)}] overlaps ${nameOf(other.element)} [${round(other.box)}]`);
}

// Boxes of one level.
for (const parent of [top, ...top.querySelectorAll("*")]) {
  if (hidden(parent) || parent.closest("svg") || getComputedStyle(parent).display === "inline") continue;
  const children = [...parent.children].filter((child) => !hidden(child) && !["fixed", "absolute"].includes(getComputedStyle(child).position)
    && !["inline", "contents"].includes(getComputedStyle(child).display) && child.tagName !== "DIALOG");
  const rects = children.map((child) => child.getBoundingClientRect());
  for (let a = 0; a < rects.length; a += 1) for (let b = a + 1; b < rects.length; b += 1) {
    const wide = Math.min(rects[a].right, rects[b].right) - Math.max(rects[a].left, rects[b].left);
    const high = Math.min(rects[a].bottom, rects[b].bottom) - Math.max(rects[a].top, rects[b].top);
    if (wide > 1.5 && high > 1.5) found.push(`boxes of ${nameOf(children[a])} and ${nameOf(children[b])} overlap`);
  }
  const style = getComputedStyle(parent);
  const holds = !["INPUT", "SELECT"].includes(parent.tagName) && parent.clientWidth > 0 && style.overflowX !== "hidden";
  if (holds && parent.scrollWidth > parent.clientWidth + 1)
    found.push(`${nameOf(parent)} is ${parent.scrollWidth} wide in ${parent.clientWidth}`);
}
for (const { element, box } of still)
  if (box.left < -1 || box.right > innerWidth + 1) found.push(`${nameOf(element)} [${round(box)}] leaves the window`);
if (document.documentElement.scrollWidth > innerWidth) found.push(`the page is ${document.documentElement.scrollWidth} wide in ${innerWidth}`);

// Contrast of text, WCAG 2.2 section 1.4.3: at least 4.5.
const channels = (colour) => { const parts = colour.match(/[\d.]+/g).map(Number); return parts.length < 4 ? [...parts, 1] : parts; };
const light = (colour) => channels(colour).slice(0, 3).map((value) => value / 255)
  .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
  .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
function ground(element) {
  for (let up = element; up; up = up.parentElement) {
    const colour = getComputedStyle(up).backgroundColor;
    if (channels(colour)[3] === 1) return colour;
  }
  return "rgb(255, 255, 255)";
}
for (const { element } of real) {
  if (element.closest(":disabled")) continue;
  const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) found.push(`${nameOf(element)} has a contrast of ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
}

// Room for a finger, WCAG 2.2 section 2.5.8: at least 24 by 24.
if (innerWidth < 500) for (const element of top.querySelectorAll("button, input, select")) {
  const box = element.getBoundingClientRect();
  if (!hidden(element) && (box.width < 24 || box.height < 24)) found.push(`${nameOf(element)} is ${Math.round(box.width)} by ${Math.round(box.height)}`);
}
return [...new Set(found)].slice(0, 20);
