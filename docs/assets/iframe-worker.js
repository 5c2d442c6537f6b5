/* Search on pages that are opened from disk.
 *
 * A browser starts no Worker from a file.  There the theme's search runs in a hidden frame, which
 * this class offers under the interface of a Worker.  The theme would load such a class from
 * another site; this file takes its place, so that the pages load nothing from elsewhere.
 */
if (location.protocol === "file:") {
  const inFrame = `
    function postMessage(data) { parent.postMessage({ iframeWorker: data }, "*") }
    function importScripts(...urls) {
      return urls.reduce((before, url) => before.then(() => new Promise((resolve, reject) => {
        const script = document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        document.body.appendChild(script)
      })), Promise.resolve())
    }`
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      const end = "</" + "script>"
      this.frame.srcdoc =
        `<html><body><script>${inFrame}${end}<script src="${url}">${end}</body></html>`
      this.ready = new Promise((resolve) => (this.frame.onload = resolve))
      addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow || !("iframeWorker" in event.data)) return
        const message = new MessageEvent("message", { data: event.data.iframeWorker })
        this.dispatchEvent(message)
        this.onmessage?.(message)
      })
      document.body.appendChild(this.frame)
    }
    postMessage(data) {
      // The frame's own postMessage answers: use that of this window.
      this.ready.then(() => window.postMessage.call(this.frame.contentWindow, data, "*"))
    }
    terminate() {
      this.frame.remove()
    }
  }
  window.IFrameWorker = IFrameWorker
  window.Worker = IFrameWorker
}
